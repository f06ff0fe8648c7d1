//! A server on the loopback interface that answers as Hugging Face does, and as badly as it sometimes does; folders that go away.

#![allow(dead_code)] // Each test binary takes what it needs.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use quire_engine::store::{Progress, StoreSettings};
use sha2::{Digest, Sha256};

/// What the stub heard.
#[derive(Clone, Debug)]
pub struct Heard {
    pub path: String,
    /// Names in lower case.
    pub headers: HashMap<String, String>,
}

/// What it answers.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Closes the connection after so many bytes of the body.
    pub cut: Option<usize>,
    /// After the cut: holds the connection open instead of closing it.
    pub stall: bool,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into(), cut: None, stall: false }
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    /// A file that honours Range and If-Range.
    pub fn file(heard: &Heard, content: &[u8], etag: &str) -> Self {
        let range = heard.headers.get("range").filter(|_| heard.headers.get("if-range").is_none_or(|given| given == etag));
        let start = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
        match start {
            Some(start) if start >= content.len() => Self::new(416, ""),
            Some(start) => Self::new(206, &content[start..])
                .with("content-range", format!("bytes {start}-{}/{}", content.len() - 1, content.len()))
                .with("etag", etag),
            None => Self::new(200, content).with("etag", etag),
        }
    }
}

pub struct Stub {
    pub url: String,
    heard: Arc<Mutex<Vec<Heard>>>,
    stop: Arc<AtomicBool>,
    port: u16,
}

impl Stub {
    pub fn start(answer: impl Fn(usize, &Heard) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (log, stopped, answer) = (Arc::clone(&heard), Arc::clone(&stop), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let (log, stopped, answer) = (Arc::clone(&log), Arc::clone(&stopped), Arc::clone(&answer));
                thread::spawn(move || {
                    let Some(request) = read_head(&stream) else { return };
                    let number = {
                        let mut log = log.lock().unwrap();
                        log.push(request.clone());
                        log.len() - 1
                    };
                    send(stream, answer(number, &request), &stopped);
                });
            }
        });
        Self { url: format!("http://127.0.0.1:{port}"), heard, stop, port }
    }

    pub fn heard(&self) -> Vec<Heard> {
        self.heard.lock().unwrap().clone()
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn read_head(stream: &TcpStream) -> Option<Heard> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let path = lines.next()?.ok()?.split(' ').nth(1)?.to_owned();
    let mut headers = HashMap::new();
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':')?;
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    Some(Heard { path, headers })
}

fn send(mut stream: TcpStream, reply: Reply, stopped: &AtomicBool) {
    let mut head = format!("HTTP/1.1 {} X\r\ncontent-length: {}\r\nconnection: close\r\n", reply.status, reply.body.len());
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let end = reply.cut.unwrap_or(reply.body.len());
    let _ = stream.write_all(format!("{head}\r\n").as_bytes());
    let _ = stream.write_all(&reply.body[..end]);
    let _ = stream.flush();
    while reply.stall && !stopped.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_millis(20));
    }
}

/// A folder of its own for a test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("store-{name}-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Names of all files below, sorted, without locks.
    pub fn files(&self) -> Vec<String> {
        fn walk(folder: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    walk(&entry.path(), found)
                } else {
                    found.push(entry.file_name().to_string_lossy().into_owned())
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.0, &mut found);
        found.retain(|name| name != ".lock");
        found.sort();
        found
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Short pauses, the stub as Hugging Face, a Python that isn't there.
pub fn settings(folder: &Folder, endpoint: &str) -> StoreSettings {
    let mut settings = StoreSettings::in_folder(&folder.0);
    settings.hf_endpoint = endpoint.to_owned();
    settings.python = "no-such-python".into();
    settings.connect_timeout = Duration::from_secs(2);
    settings.silence_timeout = Duration::from_millis(700);
    settings.retry_pause = Duration::from_millis(10);
    settings
}

/// Bytes without pattern, the same every time.
pub fn content(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as u8
        })
        .collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Remembers what it was told; may ask to stop after some bytes.
#[derive(Default)]
pub struct Recorder {
    pub notes: Mutex<Vec<String>>,
    pub last: Mutex<u64>,
    pub total: Mutex<Option<u64>>,
    pub stop_after: Option<u64>,
}

impl Progress for Recorder {
    fn started(&self, _: &str, total: Option<u64>) {
        *self.total.lock().unwrap() = total;
    }
    fn advanced(&self, bytes: u64) {
        *self.last.lock().unwrap() = bytes;
    }
    fn finished(&self) {}
    fn note(&self, message: &str) {
        self.notes.lock().unwrap().push(message.to_owned());
    }
    fn cancelled(&self) -> bool {
        self.stop_after.is_some_and(|stop| *self.last.lock().unwrap() >= stop)
    }
}
