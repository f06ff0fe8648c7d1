//! Server-sent events: frames of one answer, pulled by the socket. Nothing is buffered here: a reader that is slow slows
//! the stream that it reads, and one that leaves drops it.

use std::time::Duration;

use axum::{body::Body, response::Response};
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{HeaderValue, header};
use serde::Serialize;

use super::{generation::Events, reply};
use crate::{error::ApiError, request::TextEvent};

const DONE: &[u8] = b"data: [DONE]\n\n";
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// How a protocol writes the events of an answer.
pub trait Chunks: Send + 'static {
    /// Frames for one event of one prompt; may be none.
    fn event(&mut self, prompt: usize, event: TextEvent, out: &mut Frames);
    /// Frames after the last event.
    fn end(&mut self, out: &mut Frames);
    /// Frames for an error, which is the last thing.
    fn failed(&mut self, error: &ApiError, out: &mut Frames) {
        out.push(&error.body());
    }
    /// Whether `[DONE]` tells the end.
    fn says_done(&self) -> bool {
        true
    }
}

/// Frames that are ready to be sent.
#[derive(Default)]
pub struct Frames(Vec<u8>);

impl Frames {
    /// Appends one data frame.
    pub fn push(&mut self, chunk: &impl Serialize) {
        let length = self.0.len();
        self.0.extend_from_slice(b"data: ");
        match serde_json::to_writer(&mut self.0, chunk) {
            Ok(()) => self.0.extend_from_slice(b"\n\n"),
            // Chunks are plain structs with string keys: can't fail; half a frame would be worse than none.
            Err(_) => self.0.truncate(length),
        }
    }

    /// Appends one frame with the name of its event.
    pub fn push_named(&mut self, name: &str, chunk: &impl Serialize) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.push(chunk);
    }

    fn take(&mut self) -> Bytes {
        Bytes::from(std::mem::take(&mut self.0))
    }
}

struct Sending<C> {
    events: Events,
    chunks: C,
    frames: Frames,
    keep_alive: Duration,
    done: bool,
}

/// The response: `events` as `chunks` writes them, then `[DONE]`; a comment whenever `keep_alive` passes without any.
pub fn response(events: Events, chunks: impl Chunks, keep_alive: Duration) -> Response {
    let sending = Sending { events, chunks, frames: Frames::default(), keep_alive, done: false };
    let body = stream::unfold(sending, |mut sending| async move {
        let bytes = sending.next().await?;
        Some((Ok::<_, std::convert::Infallible>(bytes), sending))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that buffer would undo the streaming.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<C: Chunks> Sending<C> {
    async fn next(&mut self) -> Option<Bytes> {
        while !self.done {
            let event = match tokio::time::timeout(self.keep_alive, self.events.next()).await {
                Ok(event) => event,
                Err(_) => return Some(Bytes::from_static(KEEP_ALIVE)),
            };
            match event {
                Some(Ok((prompt, event))) => self.chunks.event(prompt, event, &mut self.frames),
                Some(Err(error)) => self.finish(Some(&error)),
                None => self.finish(None),
            }
            if !self.frames.0.is_empty() {
                return Some(self.frames.take());
            }
        }
        None
    }

    fn finish(&mut self, error: Option<&ApiError>) {
        match error {
            Some(error) => {
                reply::count(error);
                self.chunks.failed(error, &mut self.frames);
            }
            None => self.chunks.end(&mut self.frames),
        }
        if self.chunks.says_done() {
            self.frames.0.extend_from_slice(DONE);
        }
        self.done = true;
        // Other prompts of the same call may still run.
        self.events = stream::empty().boxed();
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    struct Echo;

    impl Chunks for Echo {
        fn event(&mut self, prompt: usize, event: TextEvent, out: &mut Frames) {
            if let TextEvent::Delta { text, .. } = event {
                out.push(&format!("{prompt}{text}"));
            }
        }

        fn end(&mut self, out: &mut Frames) {
            out.push(&"end");
        }
    }

    fn delta(text: &str) -> Result<(usize, TextEvent), ApiError> {
        let delta = TextEvent::Delta { choice: 0, text: text.to_owned(), parts: Vec::new(), token_ids: Vec::new(), logprobs: Vec::new() };
        Ok((0, delta))
    }

    async fn sent(events: Events) -> String {
        let body = response(events, Echo, Duration::from_secs(15)).into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn frames_end_with_done() {
        let text = sent(stream::iter([delta("a"), delta("line\nbreak")]).boxed()).await;
        assert_eq!(text, "data: \"0a\"\n\ndata: \"0line\\nbreak\"\n\ndata: \"end\"\n\ndata: [DONE]\n\n");
    }

    #[tokio::test]
    async fn an_error_is_one_event_and_the_last() {
        let text = sent(stream::iter([delta("a"), Err(ApiError::Deadline), delta("b")]).boxed()).await;
        assert!(text.starts_with("data: \"0a\"\n\ndata: {\"error\":{"), "{text}");
        assert!(text.ends_with("}}\n\ndata: [DONE]\n\n") && !text.contains("0b") && !text.contains("end"), "{text}");
    }

    #[tokio::test]
    async fn silence_is_filled_with_comments() {
        let slow = stream::once(async {
            tokio::time::sleep(Duration::from_millis(400)).await;
            delta("late")
        });
        let answer = response(slow.boxed(), Echo, Duration::from_millis(30));
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert!(text.starts_with(": keep-alive\n\n: keep-alive\n\n") && text.contains("0late"), "{text}");
    }
}
