//! A call as a JSON object, character by character: the name as soon as it is there, the arguments as they come.

/// What a scanner found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Name {
        id: Option<String>,
        name: String,
    },
    /// More of the arguments.
    Arguments(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    More,
    /// The object is complete.
    Done,
    /// This is no call.
    Failed,
}

/// Follows one JSON value to its end.
enum Value {
    Text { escaped: bool },
    Nested { depth: usize, quoted: bool, escaped: bool },
    Scalar,
}

#[derive(PartialEq)]
enum End {
    No,
    /// The character is the value's last.
    With,
    /// The character is the first after it.
    Before,
}

impl Value {
    fn new(first: char) -> Self {
        match first {
            '"' => Self::Text { escaped: false },
            '{' | '[' => Self::Nested { depth: 1, quoted: false, escaped: false },
            _ => Self::Scalar,
        }
    }

    fn feed(&mut self, c: char) -> End {
        match self {
            Self::Text { escaped } => match c {
                _ if *escaped => *escaped = false,
                '\\' => *escaped = true,
                '"' => return End::With,
                _ => {}
            },
            Self::Nested { depth, quoted, escaped } => match c {
                _ if *escaped => *escaped = false,
                '\\' if *quoted => *escaped = true,
                '"' => *quoted = !*quoted,
                '{' | '[' if !*quoted => *depth += 1,
                '}' | ']' if !*quoted => {
                    *depth -= 1;
                    if *depth == 0 {
                        return End::With;
                    }
                }
                _ => {}
            },
            Self::Scalar => {
                if c == ',' || c == '}' || c == ']' || c.is_whitespace() {
                    return End::Before;
                }
            }
        }
        End::No
    }
}

/// Arguments alone: a JSON object from its first brace on.
pub(super) struct ArgumentsScanner(Value);

impl ArgumentsScanner {
    /// After the opening brace.
    pub fn new() -> Self {
        Self(Value::new('{'))
    }

    /// Whether `c` ends it.
    pub fn feed(&mut self, c: char) -> bool {
        self.0.feed(c) == End::With
    }
}

enum State {
    Key,
    InKey { escaped: bool },
    Colon,
    Value,
    InValue { value: Value, role: Role },
}

#[derive(Clone, Copy, PartialEq)]
enum Role {
    Name,
    Id,
    Arguments,
    Other,
}

/// A call object, after its opening brace.
pub(super) struct CallScanner {
    state: State,
    /// Objects that are open: the call, and its `function`.
    level: usize,
    key: String,
    /// Text of the present value, where all of it is needed.
    text: String,
    id: Option<String>,
    named: bool,
    arguments: bool,
    /// Arguments that came before the name.
    early: String,
    /// Only keys of calls may come before the name.
    strict: bool,
}

impl CallScanner {
    pub fn new(strict: bool) -> Self {
        Self {
            state: State::Key,
            level: 1,
            key: String::new(),
            text: String::new(),
            id: None,
            named: false,
            arguments: false,
            early: String::new(),
            strict,
        }
    }

    /// Takes a character.
    pub fn feed(&mut self, c: char, found: &mut Vec<Found>) -> Status {
        match &mut self.state {
            State::Key => self.expect_key(c, found),
            State::InKey { escaped } => {
                if *escaped {
                    *escaped = false;
                } else if c == '\\' {
                    *escaped = true;
                } else if c == '"' {
                    self.key = unescape(&std::mem::take(&mut self.key));
                    self.state = State::Colon;
                    return Status::More;
                }
                self.key.push(c);
                Status::More
            }
            State::Colon => {
                if c == ':' {
                    self.state = State::Value;
                    Status::More
                } else if c.is_whitespace() {
                    Status::More
                } else {
                    self.fail()
                }
            }
            State::Value if c.is_whitespace() => Status::More,
            State::Value => self.begin_value(c, found),
            State::InValue { value, role } => {
                let (end, role) = (value.feed(c), *role);
                if end != End::Before {
                    self.keep(c, role, found);
                }
                if end == End::No {
                    return Status::More;
                }
                self.state = State::Key;
                self.end_value(role, found);
                if end == End::Before { self.expect_key(c, found) } else { Status::More }
            }
        }
    }

    fn fail(&self) -> Status {
        if self.named { Status::More } else { Status::Failed }
    }

    fn expect_key(&mut self, c: char, found: &mut Vec<Found>) -> Status {
        match c {
            '"' => {
                self.key.clear();
                self.state = State::InKey { escaped: false };
            }
            '}' => {
                self.level -= 1;
                if self.level == 0 {
                    if !self.named {
                        return Status::Failed;
                    }
                    if !self.arguments {
                        found.push(Found::Arguments("{}".to_owned()));
                    }
                    return Status::Done;
                }
            }
            ',' => {}
            _ if c.is_whitespace() => {}
            _ => return self.fail(),
        }
        Status::More
    }

    fn begin_value(&mut self, c: char, found: &mut Vec<Found>) -> Status {
        let role = match self.key.as_str() {
            "function" if c == '{' => {
                self.level += 1;
                self.state = State::Key;
                return Status::More;
            }
            "name" | "function" if c == '"' && !self.named => Role::Name,
            "id" if c == '"' => Role::Id,
            "arguments" | "parameters" if !self.arguments => Role::Arguments,
            "type" | "id" | "name" | "function" | "arguments" | "parameters" => Role::Other,
            _ if self.strict && !self.named => return Status::Failed,
            _ => Role::Other,
        };
        self.arguments |= role == Role::Arguments;
        self.text.clear();
        self.state = State::InValue { value: Value::new(c), role };
        self.keep(c, role, found);
        Status::More
    }

    fn keep(&mut self, c: char, role: Role, found: &mut Vec<Found>) {
        let streamed = matches!(&self.state, State::InValue { value: Value::Nested { .. }, .. });
        match role {
            Role::Other => {}
            Role::Arguments if streamed && self.named => say(found, c),
            Role::Arguments if streamed => self.early.push(c),
            _ => self.text.push(c),
        }
    }

    fn end_value(&mut self, role: Role, found: &mut Vec<Found>) {
        let text = std::mem::take(&mut self.text);
        let inner = || unescape(text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(&text));
        match role {
            Role::Name => {
                self.named = true;
                found.push(Found::Name { id: self.id.take(), name: inner() });
                if !self.early.is_empty() {
                    found.push(Found::Arguments(std::mem::take(&mut self.early)));
                }
            }
            Role::Id => self.id = Some(inner()),
            // Written as a string of JSON, or nothing at all.
            Role::Arguments if !text.is_empty() => {
                let arguments = if text == "null" { "{}".to_owned() } else { inner() };
                if self.named { found.push(Found::Arguments(arguments)) } else { self.early = arguments }
            }
            Role::Arguments | Role::Other => {}
        }
    }
}

fn say(found: &mut Vec<Found>, c: char) {
    match found.last_mut() {
        Some(Found::Arguments(text)) => text.push(c),
        _ => found.push(Found::Arguments(c.to_string())),
    }
}

fn unescape(raw: &str) -> String {
    serde_json::from_str(&format!("\"{raw}\"")).unwrap_or_else(|_| raw.to_owned())
}
