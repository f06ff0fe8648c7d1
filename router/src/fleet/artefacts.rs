//! Tokenizers and templates of workers, by content hash.
//!
//! Owns what keeps a tokenizer from being fetched or built twice. Nothing is kept alive here: what no worker serves any
//! more goes away with the snapshot that named it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::Mutex;
use quire_proto::worker::v1::ModelCard;
use sha2::{Digest, Sha256};
use tonic::Status;

use crate::text::{ModelText, Tokenizer};
use crate::worker::Worker;

/// Everything of a card that decides what its text side is.
type TextKey = (String, String, Option<u32>, Vec<u32>, bool);

#[derive(Default)]
pub(super) struct Cache {
    tokenizers: Mutex<HashMap<String, Weak<Tokenizer>>>,
    texts: Mutex<HashMap<TextKey, Weak<ModelText>>>,
}

impl Cache {
    /// The text side of a model, fetched from the worker if it isn't here.
    pub async fn text(&self, worker: &dyn Worker, card: &ModelCard) -> Result<Arc<ModelText>, Status> {
        let key = (card.tokenizer_hash.clone(), card.chat_template_hash.clone(), card.bos_id, card.eos_ids.clone(), card.add_bos);
        if let Some(text) = self.texts.lock().get(&key).and_then(Weak::upgrade) {
            return Ok(text);
        }
        let template = match card.chat_template_hash.as_str() {
            "" => None,
            hash => Some(fetch(worker, hash).await?),
        };
        let known = self.tokenizers.lock().get(&card.tokenizer_hash).and_then(Weak::upgrade);
        let tokenizer = match known {
            Some(tokenizer) => tokenizer,
            None => {
                let json = fetch(worker, &card.tokenizer_hash).await?;
                Arc::new(blocking(move || Tokenizer::from_json(&json)).await?)
            }
        };
        let text = Arc::new(ModelText::new(card, tokenizer.clone(), template.as_deref()));
        let mut tokenizers = self.tokenizers.lock();
        tokenizers.retain(|_, tokenizer| tokenizer.strong_count() > 0);
        tokenizers.insert(card.tokenizer_hash.clone(), Arc::downgrade(&tokenizer));
        let mut texts = self.texts.lock();
        texts.retain(|_, text| text.strong_count() > 0);
        texts.insert(key, Arc::downgrade(&text));
        Ok(text)
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, crate::error::ApiError> + Send + 'static) -> Result<T, Status> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| Status::internal("loading the tokenizer failed"))?
        .map_err(|error| Status::internal(error.to_string()))
}

async fn fetch(worker: &dyn Worker, hash: &str) -> Result<Bytes, Status> {
    let bytes = worker.artefact(hash).await?;
    let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    if digest.eq_ignore_ascii_case(hash) { Ok(bytes) } else { Err(Status::data_loss(format!("artefact {hash} has digest {digest}"))) }
}
