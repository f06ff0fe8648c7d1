//! Watches one worker for as long as the router lives: describe, publish, follow its load reports, and again after a loss.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use rand::Rng;
use tokio::time::timeout;
use tonic::{Code, Status};

use super::member::Member;
use super::{ModelOffer, Shared};

/// Intervals without a report after which a worker counts as gone.
const SILENT_INTERVALS: u32 = 5;

pub(super) async fn supervise(shared: &Shared, member: &Arc<Member>) {
    let config = &shared.config;
    let mut pause = config.backoff_min;
    let mut told = false;
    loop {
        match describe(shared, member).await {
            Ok(models) => {
                tracing::info!(worker = %member.name, models = models.len(), "worker answers");
                // Failures from before this description say nothing about the worker now.
                let _ = member.lost.notified().now_or_never();
                shared.describe(member, models);
                (pause, told) = (config.backoff_min, false);
                let reason = follow(shared, member).await;
                tracing::warn!(worker = %member.name, %reason, "worker is gone");
                shared.lose(member);
            }
            Err(status) => {
                // Once a loss, not once an attempt.
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(worker = %member.name, %status, "worker can't be reached");
                }
            }
        }
        let jitter = rand::rng().random_range(0.5..1.0);
        tokio::time::sleep(pause.mul_f64(jitter)).await;
        pause = (pause * 2).min(config.backoff_max);
    }
}

/// What the worker serves, with everything needed to speak text for it.
async fn describe(shared: &Shared, member: &Arc<Member>) -> Result<Vec<ModelOffer>, Status> {
    let limit = shared.config.describe_timeout;
    let silent = |_| Status::deadline_exceeded("no answer");
    let description = timeout(limit, member.worker.describe()).await.map_err(silent)??;
    let mut models = Vec::with_capacity(description.models.len());
    for card in description.models {
        let text = timeout(limit, shared.artefacts.text(member.worker.as_ref(), &card)).await.map_err(silent)??;
        models.push(ModelOffer { card: Arc::new(card), text });
    }
    member.epoch.store(description.epoch, Ordering::Relaxed);
    Ok(models)
}

/// Follows load reports until the worker is gone; tells why. A restart ends the stream, so a new epoch is always seen by
/// describing again.
async fn follow(shared: &Shared, member: &Arc<Member>) -> String {
    let interval = shared.config.watch_interval;
    let limit = interval.saturating_mul(SILENT_INTERVALS).max(Duration::from_secs(1));
    let mut reports = match timeout(limit, member.worker.watch(interval.as_millis() as u32)).await {
        Ok(Ok(reports)) => reports,
        // Nothing to follow: only a failed call tells.
        Ok(Err(status)) if status.code() == Code::Unimplemented => {
            member.lost.notified().await;
            return "a call failed".to_owned();
        }
        Ok(Err(status)) => return status.to_string(),
        Err(_) => return "no load reports".to_owned(),
    };
    loop {
        tokio::select! {
            () = member.lost.notified() => return "a call failed".to_owned(),
            report = timeout(limit, reports.next()) => match report {
                Ok(Some(Ok(report))) => member.report(report),
                Ok(Some(Err(status))) => return status.to_string(),
                Ok(None) => return "it ended its load reports".to_owned(),
                Err(_) => return "no load reports".to_owned(),
            },
        }
    }
}
