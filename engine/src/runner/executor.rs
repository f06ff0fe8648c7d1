//! A decoder with its buffers, as an [`Executor`].

use std::collections::VecDeque;

use quire_kernels::{
    KernelError,
    backend::Backend,
    plan::{StepLimits, StepOutput, StepPlan},
};

use super::{Executor, MemoryPlan, Ticket};
use crate::model::{Decoder, Scratch};

/// Runs plans on one device. Everything a step touches is allocated here, once.
///
/// Depth 0: `submit` computes, `wait` reads back.
pub struct ModelExecutor<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    limits: StepLimits,
    inputs: B::Inputs,
    sampled: B::Sampled,
    kv: B::Kv,
    hidden: B::Buffer,
    logits: B::Buffer,
    scratch: Scratch<B>,
    next: u64,
    /// The step whose tokens are still on the device, with its number of logit rows.
    unread: Option<(Ticket, usize)>,
    /// Steps that were read back because another was submitted before they were waited for.
    read: VecDeque<(Ticket, StepOutput)>,
    /// Their memory, to be used again.
    spare: Vec<StepOutput>,
}

impl<B: Backend> ModelExecutor<B> {
    /// Allocates what `memory` says. The pages of the cache are not touched.
    pub fn new(backend: B, decoder: Decoder<B>, memory: &MemoryPlan) -> Result<Self, KernelError> {
        let d = decoder.description();
        let limits = memory.limits;
        Ok(Self {
            inputs: backend.inputs(&limits, d.vocabulary)?,
            sampled: backend.sampled(&limits)?,
            kv: backend.kv_of(&memory.kv_shapes, &memory.kv_groups)?,
            hidden: backend.buffer(limits.rows * d.hidden)?,
            logits: backend.buffer(limits.logit_rows * d.vocabulary)?,
            scratch: Scratch::new(&backend, d, &limits)?,
            backend,
            decoder,
            limits,
            next: 0,
            unread: None,
            read: VecDeque::new(),
            spare: Vec::new(),
        })
    }

    #[must_use]
    pub fn backend(&self) -> &B {
        &self.backend
    }

    #[must_use]
    pub fn decoder(&self) -> &Decoder<B> {
        &self.decoder
    }

    /// Runs a step without drawing tokens and gives its logits (logit rows × vocabulary): for tests and diagnosis.
    pub fn logits_of(&mut self, plan: &StepPlan) -> Result<Vec<f32>, KernelError> {
        self.read_back()?;
        self.compute(plan)?;
        let mut out = vec![0.0; plan.logit_rows.len() * self.decoder.description().vocabulary];
        self.backend.read(&self.logits, &mut out)?;
        Ok(out)
    }

    /// Everything up to the logits.
    fn compute(&mut self, plan: &StepPlan) -> Result<(), KernelError> {
        let Self { backend, decoder, inputs, sampled, kv, hidden, logits, scratch, .. } = self;
        backend.upload(plan, inputs)?;
        if !plan.block_copies.is_empty() {
            backend.copy_blocks(inputs, kv)?;
        }
        decoder.embed(backend, inputs, sampled, hidden, scratch)?;
        decoder.forward(backend, 0..decoder.description().layers.len(), inputs, hidden, kv, scratch)?;
        if !plan.logit_rows.is_empty() {
            decoder.logits(backend, inputs, hidden, logits, scratch)?;
        }
        Ok(())
    }

    /// Saves the tokens of a step that nobody has waited for, before another step overwrites them.
    fn read_back(&mut self) -> Result<(), KernelError> {
        if let Some((ticket, rows)) = self.unread.take() {
            let mut out = self.spare.pop().unwrap_or_default();
            self.read_sampled(rows, &mut out)?;
            self.read.push_back((ticket, out));
        }
        Ok(())
    }

    fn read_sampled(&self, rows: usize, out: &mut StepOutput) -> Result<(), KernelError> {
        out.clear();
        if rows == 0 {
            out.top_starts.push(0);
            return Ok(());
        }
        self.backend.read_sampled(&self.inputs, &self.sampled, out)
    }
}

impl<B: Backend> Executor for ModelExecutor<B> {
    fn limits(&self) -> StepLimits {
        self.limits
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<Ticket, KernelError> {
        self.read_back()?;
        self.compute(plan)?;
        let rows = plan.logit_rows.len();
        // A step without logits leaves the last one's tokens where a later step can read them.
        if rows > 0 {
            let Self { backend, decoder, inputs, sampled, logits, scratch, .. } = self;
            decoder.sample(backend, inputs, logits, sampled, scratch)?;
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.unread = Some((ticket, rows));
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), KernelError> {
        if let Some((_, mut read)) = self.read.pop_front_if(|(read, _)| *read == ticket) {
            std::mem::swap(out, &mut read);
            self.spare.push(read);
            return Ok(());
        }
        match self.unread {
            Some((unread, rows)) if unread == ticket && self.read.is_empty() => {
                self.unread = None;
                self.read_sampled(rows, out)
            }
            _ => Err(KernelError::Device(format!("step {} was not submitted, or is waited for out of order", ticket.0))),
        }
    }
}
