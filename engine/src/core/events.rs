use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::Stream;
use quire_proto::worker::v1::{GenerateEvent, generate_event::Event};
use tokio::sync::mpsc;

use super::inbox::{Command, Inbox, RequestKey};

/// Events of one request: Started once, tokens of all its choices, one Finished per choice. Ends after the last of these;
/// if it ends before, the engine died. Dropping it cancels the request and wakes the step loop to free its blocks.
pub struct EventReceiver {
    receiver: mpsc::Receiver<GenerateEvent>,
    inbox: Arc<Inbox>,
    key: RequestKey,
    unfinished: usize,
}

impl EventReceiver {
    pub(super) fn new(receiver: mpsc::Receiver<GenerateEvent>, inbox: Arc<Inbox>, key: RequestKey, choices: usize) -> Self {
        Self { receiver, inbox, key, unfinished: choices }
    }

    /// The next event; `None` at the end.
    pub async fn recv(&mut self) -> Option<GenerateEvent> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// As [`recv`](Self::recv), for threads outside an async run time.
    pub fn blocking_recv(&mut self) -> Option<GenerateEvent> {
        let event = self.receiver.blocking_recv();
        self.note(event.as_ref());
        event
    }

    /// Every choice has had its Finished event.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.unfinished == 0
    }

    fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<GenerateEvent>> {
        let event = std::task::ready!(self.receiver.poll_recv(context));
        self.note(event.as_ref());
        Poll::Ready(event)
    }

    fn note(&mut self, event: Option<&GenerateEvent>) {
        if let Some(GenerateEvent { event: Some(Event::Finished(_)) }) = event {
            self.unfinished = self.unfinished.saturating_sub(1);
        }
    }
}

impl Stream for EventReceiver {
    type Item = GenerateEvent;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<GenerateEvent>> {
        self.poll_recv(context)
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        if self.unfinished > 0 {
            // Closed first, so that the loop sees it even if it reads the command late.
            self.receiver.close();
            self.inbox.push(Command::Cancel(self.key));
        }
    }
}
