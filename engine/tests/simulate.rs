//! The simulated worker: what the default policy promises, and the table that it was chosen from.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use quire_engine::{
    scheduler::SchedulerConfig,
    simulate::{Arrival, Cost, Report, Scenario, scenarios, simulate, table},
};

fn scenario(name: &str, requests: usize) -> Scenario {
    scenarios(requests).into_iter().find(|scenario| scenario.name == name).unwrap()
}

fn run(name: &str, requests: usize) -> Vec<(&'static str, Report)> {
    let reports: Vec<_> = scenario(name, requests).run().collect();
    for (policy, report) in &reports {
        assert_eq!((report.stuck, report.refused), (0, 0), "{name}, {policy}");
        println!("{name}: {policy} |{report}");
    }
    reports
}

/// All tables: QUIRE_SIM_REQUESTS=5000 cargo test --release -p quire-engine --test simulate -- --nocapture
#[test]
fn every_scenario_runs_to_its_end_and_is_the_same_twice() {
    let requests = std::env::var("QUIRE_SIM_REQUESTS").map_or(300, |text| text.parse().unwrap());
    for scenario in scenarios(requests) {
        let began = Instant::now();
        let text = table(&scenario);
        let runs = scenario.policies.len() * scenario.trace.requests;
        println!("{text}\n({:.0} requests a second of real time)\n", runs as f64 / began.elapsed().as_secs_f64());
        let reports: Vec<_> = scenario.run().collect();
        assert!(reports.iter().all(|(_, report)| report.stuck == 0 && report.refused == 0));
        assert!(reports.iter().all(|(_, report)| report.finished == scenario.trace.requests));
        if requests <= 300 {
            assert_eq!(text, table(&scenario));
        }
    }
}

#[test]
fn room_for_growth_makes_preemption_rare_and_costs_no_throughput() {
    let reports = run("tight", 5000);
    let (plain, default) = (reports[0].1, reports.iter().find(|(name, _)| name.contains("default")).unwrap().1);
    assert!(plain.preemptions > 100, "the memory is not tight: {}", plain.preemptions);
    assert!(default.preemptions * 4 < plain.preemptions, "{} of {}", default.preemptions, plain.preemptions);
    assert!(default.tokens_per_second > 0.95 * plain.tokens_per_second);
}

#[test]
fn taken_blocks_waste_under_four_per_cent() {
    for (policy, report) in run("chat", 1500) {
        assert!(report.waste > 0.0 && report.waste < 0.04, "{policy}: {}", report.waste);
    }
}

#[test]
fn a_target_bounds_the_time_between_tokens_and_costs_little() {
    let reports = run("long prompts", 2000);
    let (free, aimed) = (reports[0].1, reports[2].1);
    assert_eq!(reports[2].0, "target 50 ms");
    assert!(free.itl.max > 200.0, "nothing stutters: {}", free.itl.max);
    assert!(aimed.itl.p99 <= 50.0, "p99 {}", aimed.itl.p99);
    assert!(aimed.tokens_per_second > 0.95 * free.tokens_per_second);
}

#[test]
fn eight_streams_hardly_notice_a_prompt_of_four_thousand_tokens() {
    let arrival = |number: u32, second: u64, len: u32, output| Arrival {
        at: Duration::from_secs(second),
        tokens: (0..len).map(|i| number * 100_000 + i).collect(),
        output,
        max_output: output,
        priority: 0,
    };
    let streams: Vec<_> = (0..8).map(|i| arrival(i, 0, 40, 500)).collect();
    let both: Vec<_> = streams.iter().cloned().chain([arrival(9, 2, 4000, 20)]).collect();
    let config = scenario("long prompts", 100).config;
    let cost = Cost::small_cpu();
    let alone = simulate(&config, &cost, &streams);
    let free = simulate(&config, &cost, &both);
    let itl_target = Some(Duration::from_secs_f32(2.0 * alone.itl.p50 / 1e3));
    let aimed = simulate(&SchedulerConfig { itl_target, ..config }, &cost, &both);
    println!("alone |{alone}\nno target |{free}\ntarget {itl_target:?} |{aimed}");
    assert!(free.itl.max > 10.0 * alone.itl.p99);
    assert!(aimed.itl.p99 <= 2.0 * alone.itl.p99, "{} of {}", aimed.itl.p99, alone.itl.p99);
    assert!(aimed.tokens_per_second > 0.95 * free.tokens_per_second);
    assert_eq!(aimed.finished, 9);
}

#[test]
fn ageing_lets_low_priority_in_and_high_priority_first() {
    let reports = run("priorities", 5000);
    let (absolute, aged) = (reports[0].1, reports[1].1);
    assert!(aged.ttft_low.p99 < absolute.ttft_low.p99);
    assert!(aged.ttft.p50 < aged.ttft_low.p50);
}

#[test]
fn windows_hold_a_fraction_of_what_full_layers_hold() {
    let reports = run("windows", 1500);
    let of = |name: &str| reports.iter().find(|(other, _)| *other == name).unwrap().1;
    let (full, windows) = (of("all layers full, ample"), of("windows, ample"));
    assert!(windows.memory < 0.6 * full.memory, "{} of {}", windows.memory, full.memory);
    assert!(windows.peak_memory < full.peak_memory);
    assert!(windows.waste < 0.04, "{}", windows.waste);
    let (full, windows) = (of("all layers full, tight"), of("windows, tight"));
    assert!(windows.widest > full.widest);
    assert!(windows.ttft.p50 < full.ttft.p50 && windows.preemptions <= full.preemptions);
}
