//! A server of this very binary as a process of its own, for measures that need one.

use std::{
    collections::VecDeque,
    net::{Ipv4Addr, TcpListener},
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpStream,
    process::{Child, Command},
};
use tokio_util::task::TaskTracker;

/// A model that is to be fetched first takes its time.
const READY: Duration = Duration::from_secs(600);
const END: Duration = Duration::from_secs(60);
/// Last lines of its log, to be shown if it fails.
const LINES: usize = 30;

/// `quire serve`. Killed if dropped before [`Served::stop`].
pub struct Served {
    process: Child,
    port: u16,
    lines: Arc<Mutex<VecDeque<String>>>,
}

impl Served {
    /// Starts it on ports that are free now, and waits until it answers. `flags` are those of `quire serve`.
    pub async fn start(model: Option<&str>, flags: &[String]) -> Result<Self> {
        let port = free_port()?;
        let mut command = Command::new(std::env::current_exe().context("this program can't find itself")?);
        command.arg("serve").args(model).args(["--host", "127.0.0.1", "--admin-port", "0", "--port"]).arg(port.to_string()).args(flags);
        // What is set for servers of this machine is not meant for this one.
        for name in ["QUIRE_API_KEY", "QUIRE_HOST", "QUIRE_PORT", "QUIRE_ADMIN_PORT"] {
            command.env_remove(name);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().context("can't start the server")?;
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(log) = process.stderr.take() {
            let kept = Arc::clone(&lines);
            TaskTracker::new().spawn(async move {
                let mut log = BufReader::new(log).lines();
                while let Ok(Some(line)) = log.next_line().await {
                    let mut kept = kept.lock();
                    if kept.len() == LINES {
                        kept.pop_front();
                    }
                    kept.push_back(line);
                }
            });
        }
        let mut served = Self { process, port, lines };
        served.wait_ready().await?;
        Ok(served)
    }

    async fn wait_ready(&mut self) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < READY {
            if let Some(status) = self.process.try_wait()? {
                bail!("the server has ended ({status}):\n{}", self.log());
            }
            if ready(self.port).await {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        bail!("the server is not ready after {READY:?}:\n{}", self.log())
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.id()
    }

    fn log(&self) -> String {
        self.lines.lock().iter().fold(String::new(), |text, line| text + "  " + line + "\n")
    }

    /// SIGTERM, and an orderly end.
    pub async fn stop(mut self) -> Result<()> {
        if let Some(pid) = self.process.id() {
            Command::new("kill").args(["-TERM", &pid.to_string()]).status().await.context("can't run `kill`")?;
        }
        let status = tokio::time::timeout(END, self.process.wait()).await;
        let status = status.with_context(|| format!("the server did not end:\n{}", self.log()))??;
        ensure!(status.success(), "the server ended with {status}:\n{}", self.log());
        Ok(())
    }
}

/// Whether `/readyz` answers 200.
async fn ready(port: u16) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.ok()?;
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .ok()?;
        BufReader::new(stream).lines().next_line().await.ok()?
    };
    tokio::time::timeout(Duration::from_secs(2), asked).await.ok().flatten().is_some_and(|line| line.contains(" 200 "))
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("there is no free port")?.local_addr()?.port())
}
