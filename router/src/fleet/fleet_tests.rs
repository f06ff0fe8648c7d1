use std::sync::atomic::Ordering;

use super::*;
use crate::core::fake::{self, Fake};

fn config() -> FleetConfig {
    FleetConfig {
        watch_interval: Duration::from_millis(20),
        describe_timeout: Duration::from_secs(5),
        backoff_min: Duration::from_millis(5),
        backoff_max: Duration::from_millis(20),
    }
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test]
async fn before_any_worker_answers_models_are_unavailable_not_unknown() {
    let fleet = Fleet::new(config());
    let worker = Fake::new(vec![]);
    worker.dead.store(true, Ordering::SeqCst);
    fleet.add("a", worker.clone());
    assert_eq!(fleet.snapshot().resolve("tiny").err().unwrap().status(), 503);
    assert!(!fleet.wait_ready(Duration::from_millis(50)).await);
    worker.dead.store(false, Ordering::SeqCst);
    assert!(fleet.wait_ready(Duration::from_secs(10)).await);
    assert!(fleet.snapshot().resolve("tiny").is_ok());
    assert_eq!(fleet.snapshot().resolve("other").err().unwrap().status(), 404);
    fleet.shutdown().await;
}

#[tokio::test]
async fn a_worker_that_goes_is_known_but_not_picked_and_comes_back() {
    let fleet = Fleet::new(config());
    let worker = Fake::new(vec![]);
    fleet.add("a", worker.clone());
    assert!(fleet.wait_ready(Duration::from_secs(10)).await);
    worker.dead.store(true, Ordering::SeqCst);
    until("seen as gone", || !fleet.ready()).await;
    let model = fleet.snapshot().resolve("tiny").unwrap();
    assert!(!model.available() && model.pick(1, &[], None).is_none());
    // It comes back with another description.
    worker.card.lock().names = vec!["renamed".into()];
    worker.dead.store(false, Ordering::SeqCst);
    until("described anew", || fleet.snapshot().resolve("renamed").is_ok_and(|model| model.available())).await;
    assert_eq!(fleet.snapshot().resolve("tiny").err().unwrap().status(), 404);
    fleet.shutdown().await;
}

#[tokio::test]
async fn an_artefact_that_is_not_what_its_hash_says_is_refused() {
    let fleet = Fleet::new(config());
    let worker = Fake::new(vec![]);
    worker.damaged.store(true, Ordering::SeqCst);
    fleet.add("a", worker.clone());
    assert!(!fleet.wait_ready(Duration::from_millis(100)).await);
    worker.damaged.store(false, Ordering::SeqCst);
    assert!(fleet.wait_ready(Duration::from_secs(10)).await);
}

#[tokio::test]
async fn equal_tokenizers_are_loaded_once() {
    let fleet = Fleet::new(config());
    let workers = [Fake::new(vec![]), Fake::new(vec![])];
    fleet.add("a", workers[0].clone());
    assert!(fleet.wait_ready(Duration::from_secs(10)).await);
    fleet.add("b", workers[1].clone());
    until("both there", || fleet.snapshot().members().iter().all(|member| member.reachable())).await;
    let model = fleet.snapshot().resolve("tiny").unwrap();
    assert!(Arc::ptr_eq(&model.servings[0].text, &model.servings[1].text));
}

#[tokio::test]
async fn the_less_busy_worker_is_picked_and_guards_count() {
    let fleet = Fleet::new(config());
    for name in ["a", "b"] {
        fleet.add(name, Fake::new(vec![]));
    }
    until("both there", || fleet.snapshot().members().iter().all(|member| member.reachable())).await;
    let model = fleet.snapshot().resolve("tiny").unwrap();
    let guards: Vec<_> = (0..10).map(|_| model.pick(1, &[], None).unwrap().1).collect();
    let counts: Vec<usize> = fleet.snapshot().members().iter().map(|member| member.in_flight()).collect();
    assert_eq!(counts, [5, 5]);
    drop(guards);
    assert!(fleet.snapshot().members().iter().all(|member| member.in_flight() == 0));
    let excluded = fleet.snapshot().members()[..1].to_vec();
    assert_eq!(model.pick(1, &excluded, None).unwrap().0.member.name, "b");
    assert!(model.pick(fake::card().max_context + 1, &[], None).is_none(), "no room");
    assert!(model.pick(1, &[], Some(&NumericsFingerprint::default())).is_none());
}

#[tokio::test]
async fn a_remote_address_must_be_one() {
    assert!(Fleet::new(config()).add_remote(&["not an address".into()]).is_err());
}
