//! How a download looks on a terminal, and in a log.

use std::{
    io::IsTerminal,
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use quire_engine::store::Progress;
use tokio_util::sync::CancellationToken;

/// Less than this isn't worth a bar or a line: files that are there are hashed in a moment.
const SHORT: Duration = Duration::from_millis(300);
/// Between lines in a log.
const INTERVAL: Duration = Duration::from_secs(5);

/// A bar on a terminal, a line now and then elsewhere; stops when `stop` says so.
pub struct Bar {
    stop: CancellationToken,
    terminal: bool,
    current: Mutex<Option<Current>>,
}

struct Current {
    what: String,
    total: Option<u64>,
    begun: Instant,
    bar: Option<ProgressBar>,
    last_line: Instant,
    done: u64,
}

impl Bar {
    pub fn new(stop: CancellationToken) -> Self {
        Self { stop, terminal: std::io::stderr().is_terminal(), current: Mutex::new(None) }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Option<Current>) -> T) -> T {
        act(&mut self.current.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

impl Progress for Bar {
    fn started(&self, what: &str, total: Option<u64>) {
        let now = Instant::now();
        self.with(|current| {
            close(current);
            *current = Some(Current { what: what.to_owned(), total, begun: now, bar: None, last_line: now, done: 0 });
        });
    }

    fn advanced(&self, bytes: u64) {
        self.with(|current| {
            let Some(current) = current else { return };
            current.done = bytes;
            if current.begun.elapsed() < SHORT {
                return;
            }
            if self.terminal {
                current.bar.get_or_insert_with(|| bar(&current.what, current.total)).set_position(bytes);
            } else if current.last_line.elapsed() >= INTERVAL {
                current.last_line = Instant::now();
                let of = current.total.map_or_else(String::new, |total| format!(" of {}", HumanBytes(total)));
                eprintln!("{}: {}{of}", current.what, HumanBytes(bytes));
            }
        });
    }

    fn finished(&self) {
        self.with(close);
    }

    fn note(&self, message: &str) {
        self.with(|current| match current.as_ref().and_then(|current| current.bar.as_ref()) {
            Some(bar) => bar.println(message),
            None => eprintln!("{message}"),
        });
    }

    fn cancelled(&self) -> bool {
        self.stop.is_cancelled()
    }
}

/// What took long leaves a line.
fn close(current: &mut Option<Current>) {
    let Some(current) = current.take() else { return };
    if let Some(bar) = current.bar {
        bar.finish_and_clear();
    }
    if current.begun.elapsed() >= SHORT && current.done > 0 {
        eprintln!("{}: {} in {:.1} s", current.what, HumanBytes(current.done), current.begun.elapsed().as_secs_f64());
    }
}

fn bar(what: &str, total: Option<u64>) -> ProgressBar {
    let template = match total {
        Some(_) => "{msg}  {bytes}/{total_bytes}  {bytes_per_sec}  {wide_bar}  {eta}",
        None => "{spinner} {msg}  {bytes}  {bytes_per_sec}",
    };
    let bar = total.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.with_message(what.to_owned())
}
