//! What is asked, and when.

use std::time::Duration;

use super::Random;

/// A log-normal length, cut at both ends.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    pub median: f64,
    /// Of the logarithm.
    pub sigma: f64,
    pub min: usize,
    pub max: usize,
}

impl Lengths {
    fn draw(&self, random: &mut Random) -> usize {
        ((self.median * (self.sigma * random.normal()).exp()) as usize).clamp(self.min, self.max)
    }
}

/// Beginnings that prompts share.
#[derive(Clone, Copy, Debug)]
pub struct Prefixes {
    pub count: usize,
    pub tokens: usize,
    /// Of the requests.
    pub share: f64,
}

/// Describes a trace.
#[derive(Clone, Debug)]
pub struct TraceSpec {
    pub requests: usize,
    /// Requests a second: a Poisson process.
    pub rate: f64,
    /// Requests that come at once whenever one comes.
    pub burst: usize,
    pub prompt: Lengths,
    pub output: Lengths,
    pub prefixes: Option<Prefixes>,
    /// Prompts of so many tokens that come among the others, evenly spaced.
    pub long: Option<(usize, usize)>,
    /// Of the requests, those of priority 1 instead of 0.
    pub low_priority: f64,
    pub seed: u64,
}

impl Default for TraceSpec {
    /// Conversations, with lengths about as ShareGPT's: prompts of 170 tokens on average, outputs of 290.
    fn default() -> Self {
        Self {
            requests: 5_000,
            rate: 10.0,
            burst: 1,
            prompt: Lengths { median: 90.0, sigma: 1.1, min: 4, max: 2048 },
            output: Lengths { median: 220.0, sigma: 0.75, min: 1, max: 2048 },
            prefixes: None,
            long: None,
            low_priority: 0.0,
            seed: 1,
        }
    }
}

/// One request.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub at: Duration,
    pub tokens: Vec<u32>,
    /// Tokens that it will say; the scheduler is told only the most that it may say.
    pub output: usize,
    pub max_output: usize,
    pub priority: i32,
}

impl TraceSpec {
    /// The requests in order of time.
    #[must_use]
    pub fn generate(&self) -> Vec<Arrival> {
        let mut random = Random::new(self.seed);
        let mut at = 0.0;
        let every = self.long.map(|(count, tokens)| (self.requests / (count + 1).max(1), tokens));
        (0..self.requests)
            .map(|number| {
                if number % self.burst.max(1) == 0 {
                    at += random.exponential() * self.burst.max(1) as f64 / self.rate;
                }
                let own = match every {
                    Some((every, tokens)) if number > 0 && number % every.max(1) == 0 => tokens,
                    _ => self.prompt.draw(&mut random),
                };
                let output = self.output.draw(&mut random);
                let mut tokens = Vec::new();
                if let Some(prefixes) = self.prefixes.filter(|prefixes| random.unit() < prefixes.share) {
                    let base = (random.below(prefixes.count) as u32 + 1) << 24;
                    tokens.extend((0..prefixes.tokens as u32).map(|i| base + i));
                }
                let base = random.bits() as u32;
                tokens.extend((0..own as u32).map(|i| base.wrapping_add(i)));
                let priority = i32::from(random.unit() < self.low_priority);
                Arrival { at: Duration::from_secs_f64(at), tokens, output, max_output: self.output.max, priority }
            })
            .collect()
    }
}
