//! Names → running engines: fetch if need be, load, spawn. The part that every verb with a model shares.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use quire_engine::{
    config::EngineConfig,
    core::{EngineHandle, KvFigures},
    model::{self, SamplingDefaults},
    service::{ServedModel, WorkerService},
    store::{LocalModel, ModelRef, Store, StoreError, StoreSettings},
};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::{progress::Bar, shutdown::Shutdown};

/// A model that runs.
pub struct Running {
    pub local: LocalModel,
    pub names: Vec<String>,
    /// `llama, 135M parameters, Q4_1, Q8_0`.
    pub about: String,
    /// `cpu (avx2), 2 threads`.
    pub compute: String,
    /// Blocks, and what they hold.
    pub memory: String,
    pub loaded_in: Duration,
}

/// The service over all models, and what there is to say of them.
pub struct Models {
    pub service: WorkerService,
    pub running: Vec<Running>,
}

/// Loads all `models`. None: a signal came first.
pub async fn start(models: Vec<(ModelRef, Vec<String>)>, config: &EngineConfig, shutdown: &Shutdown) -> Result<Option<Models>> {
    let config = config.clone();
    let (stop, bar) = (shutdown.begin.clone(), Bar::new(shutdown.begin.clone()));
    let started = on_thread(&shutdown.now, move || load_all(&models, &config, &bar, &stop)).await?;
    match started {
        Err(error) if matches!(error.downcast_ref(), Some(StoreError::Cancelled)) => {
            eprintln!("quire: {error:#}");
            Ok(None)
        }
        other => other,
    }
}

fn load_all(models: &[(ModelRef, Vec<String>)], config: &EngineConfig, bar: &Bar, stop: &CancellationToken) -> Result<Option<Models>> {
    let store = Store::new(StoreSettings::from_env());
    let (mut served, mut running) = (Vec::new(), Vec::new());
    for (model, names) in models {
        let local = store.get(model, bar)?;
        if stop.is_cancelled() {
            return Ok(None);
        }
        let names = if names.is_empty() { vec![local.name.clone()] } else { names.clone() };
        let (handle, found) = load(local, names, config)?;
        served.push(handle);
        running.push(found);
    }
    Ok((!stop.is_cancelled()).then(|| Models { service: WorkerService::new(served), running }))
}

fn load(local: LocalModel, names: Vec<String>, config: &EngineConfig) -> Result<(ServedModel, Running)> {
    let begun = Instant::now();
    let mut loaded = model::load(&local.path, names.clone(), config)?;
    if !config.author_sampling {
        loaded.card.sampling = SamplingDefaults::default();
    }
    let card = &loaded.card;
    let running = Running {
        about: format!("{}, {} parameters, {}", card.architecture, count(card.parameters), card.weights),
        compute: format!(
            "{} ({}), {} thread{}",
            card.backend,
            card.instruction_set,
            card.threads,
            if card.threads == 1 { "" } else { "s" }
        ),
        memory: loaded.memory.to_string(),
        loaded_in: begun.elapsed(),
        local,
        names,
    };
    let kv = KvFigures::from(&loaded.memory);
    let handle = EngineHandle::spawn(loaded.executor, kv, loaded.card, config)?;
    Ok((ServedModel { handle, tokenizer_json: loaded.tokenizer_json, chat_template: loaded.chat_template }, running))
}

/// `134515008` → `135M`.
pub fn count(number: u64) -> String {
    let (value, unit) = match number {
        0..1_000 => return number.to_string(),
        1_000..1_000_000 => (number as f64 / 1e3, "K"),
        1_000_000..1_000_000_000 => (number as f64 / 1e6, "M"),
        _ => (number as f64 / 1e9, "B"),
    };
    if value < 10.0 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

/// Runs blocking work on a thread of its own, which nobody waits for once `now` says to leave.
pub async fn on_thread<T: Send + 'static>(now: &CancellationToken, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (sender, receiver) = oneshot::channel();
    thread::Builder::new()
        .name("quire-load".to_owned())
        .spawn(move || {
            // The receiver is gone only if the process is leaving.
            let _ = sender.send(work());
        })
        .context("can't start a thread")?;
    match now.run_until_cancelled(receiver).await {
        Some(result) => result.map_err(|_| anyhow!("loading failed unexpectedly; the lines above say where")),
        None => Err(anyhow!("stopped")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_rounded_for_people() {
        for (number, text) in [(260, "260"), (260_032, "260K"), (1_540_000, "1.5M"), (134_515_008, "135M"), (7_240_000_000, "7.2B")] {
            assert_eq!(count(number), text);
        }
    }
}
