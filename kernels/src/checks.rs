//! Checks of an op's arguments against each other, the same for every backend: no shape error reaches a kernel.

use crate::{
    KernelError,
    args::{
        EmbedArgs, GateUpArgs, HeadNorm, Join, KeysValues, LatentArgs, LayerInputsArgs, Linear, LogitsArgs, MoeArgs, Norm, QkvArgs, Rope,
        Span,
    },
    backend::{Activation, Backend, KvShape},
    inputs::{HostInputs, shape},
};

/// Sizes of a backend's things, and the op that asks.
pub(crate) struct Check<B: Backend> {
    pub op: &'static str,
    /// Values of a buffer.
    pub len: fn(&B::Buffer) -> usize,
    /// Rows and columns.
    pub matrix: fn(&B::Linear) -> (usize, usize),
}

type Checked<T = ()> = Result<T, KernelError>;

impl<B: Backend> Check<B> {
    pub(crate) fn that(&self, good: bool, detail: impl FnOnce() -> String) -> Checked {
        shape(self.op, good, detail)
    }

    pub(crate) fn len(&self, what: &str, buffer: &B::Buffer, least: usize) -> Checked {
        let len = (self.len)(buffer);
        self.that(len >= least, || format!("{what}: {len} values, {least} needed"))
    }

    pub(crate) fn matrix(&self, what: &str, linear: &B::Linear, rows: usize, columns: usize) -> Checked {
        let got = (self.matrix)(linear);
        self.that(got == (rows, columns), || format!("{what}: {} × {}, not {rows} × {columns}", got.0, got.1))
    }

    pub(crate) fn adapters(&self, linear: &Linear<'_, B>) -> Checked {
        let (rows, columns) = (self.matrix)(linear.weight);
        for low in linear.adapters.iter().flatten() {
            let (rank, _) = (self.matrix)(&low.a);
            self.matrix("adapter A", &low.a, rank, columns)?;
            self.matrix("adapter B", &low.b, rows, rank)?;
        }
        Ok(())
    }

    pub(crate) fn norm(&self, what: &str, norm: &Norm<'_, B>, width: usize) -> Checked {
        for buffer in norm.weight.iter().chain(&norm.bias) {
            self.len(what, buffer, width)?;
        }
        Ok(())
    }

    pub(crate) fn norms<'a>(&self, what: &str, norms: impl IntoIterator<Item = &'a Norm<'a, B>>, width: usize) -> Checked {
        norms.into_iter().try_for_each(|norm| self.norm(what, norm, width))
    }

    pub(crate) fn join(&self, join: &Join<'_, B>, width: usize) -> Checked {
        self.norms("join norm", &join.norm, width)
    }

    fn head_norm(&self, what: &str, norm: Option<&HeadNorm<'_, B>>, heads: usize, dim: usize) -> Checked {
        let Some(HeadNorm { norm, span, .. }) = norm else { return Ok(()) };
        self.norm(what, norm, if *span == Span::Head { dim } else { heads * dim })
    }

    fn rope(&self, rope: &Rope<'_, B>, rows: usize, dim: usize) -> Checked {
        self.that(rope.dim <= dim && rope.dim.is_multiple_of(2), || format!("rope.dim: {} of {dim}", rope.dim))?;
        self.len("rope", rope.rows, rows * rope.dim)
    }

    /// Gives the width of the hidden state.
    pub(crate) fn embed(&self, inputs: &HostInputs, args: &EmbedArgs<'_, B>, out: &B::Buffer) -> Checked<usize> {
        let (_, width) = (self.matrix)(args.table);
        self.len("out", out, inputs.plan().rows() * width)?;
        self.norms("norm", &args.norm, width)?;
        if let Some((table, offset)) = args.positions {
            let (positions, columns) = (self.matrix)(table);
            self.that(columns == width, || format!("positions: {columns} columns, not {width}"))?;
            let last = inputs.plan().positions.iter().max().map_or(0, |&p| p as usize + offset as usize);
            self.that(last < positions || inputs.plan().rows() == 0, || format!("positions: {last} is not below {positions}"))?;
        }
        Ok(width)
    }

    /// Gives the width of a row of inputs of all layers.
    pub(crate) fn layer_inputs(
        &self,
        inputs: &HostInputs,
        args: &LayerInputsArgs<'_, B>,
        hidden: &B::Buffer,
        out: &B::Buffer,
    ) -> Checked<usize> {
        let (rows, (width, columns)) = (inputs.plan().rows(), (self.matrix)(args.projection.weight));
        self.adapters(&args.projection)?;
        self.that((self.matrix)(args.table).1 == width, || format!("table: not {width} columns"))?;
        self.that(args.width > 0 && width.is_multiple_of(args.width), || format!("width: {width} in parts of {}", args.width))?;
        self.norm("norm", &args.norm, args.width)?;
        self.len("hidden", hidden, rows * columns)?;
        self.len("out", out, rows * width)?;
        Ok(width)
    }

    pub(crate) fn qkv(&self, inputs: &HostInputs, args: &QkvArgs<'_, B>, kv: &KvShape, hidden: &B::Buffer, q: &B::Buffer) -> Checked {
        let &QkvArgs { heads, kv_heads, key_dim, value_dim, keys_values, .. } = args;
        let (rows, (_, columns)) = (inputs.plan().rows(), (self.matrix)(args.linear.weight));
        inputs.check_kv(self.op, args.group, args.layer, kv)?;
        self.that((kv.kv_heads, kv.key_dim, kv.value_dim) == (kv_heads, key_dim, value_dim), || "the cache has other heads".into())?;
        let values = keys_values == KeysValues::Elsewhere || !kv.shared_values;
        self.that(values, || "the cache holds no values".into())?;
        self.that(keys_values != KeysValues::ValuesAreKeys || key_dim == value_dim, || "values are keys, and not as wide".into())?;
        self.matrix("linear", args.linear.weight, args.projected(), columns)?;
        self.adapters(&args.linear)?;
        self.norms("norm", &args.norm, columns)?;
        self.head_norm("query_norm", args.query_norm.as_ref(), heads, key_dim)?;
        self.head_norm("key_norm", args.key_norm.as_ref(), kv_heads, key_dim)?;
        self.head_norm("value_norm", args.value_norm.as_ref(), kv_heads, value_dim)?;
        if let Some(rope) = &args.rope {
            self.rope(rope, rows, key_dim)?;
        }
        self.len("hidden", hidden, rows * columns)?;
        self.len("q", q, rows * heads * key_dim)
    }

    pub(crate) fn latent(&self, inputs: &HostInputs, args: &LatentArgs<'_, B>, kv: &KvShape, hidden: &B::Buffer, q: &B::Buffer) -> Checked {
        let &LatentArgs { heads, plain_dim, latent, .. } = args;
        let (rows, turned) = (inputs.plan().rows(), args.rope.dim);
        let (down, columns) = (self.matrix)(args.down.weight);
        inputs.check_kv(self.op, args.group, args.layer, kv)?;
        self.that((kv.kv_heads, kv.key_dim, kv.value_dim, kv.shared_values) == (1, latent + turned, latent, true), || {
            format!("the cache is not one of latents: 1 head of {} and {latent}, shared", latent + turned)
        })?;
        self.that(heads > 0 && down > latent + turned, || format!("down: {down} rows for {latent} + {turned}"))?;
        let source = down - latent - turned;
        let queries = heads * (plain_dim + turned);
        match &args.query_up {
            None => self.that(source == queries, || format!("down: {source} rows of queries, not {queries}"))?,
            Some((norm, linear)) => {
                self.norm("query norm", norm, source)?;
                self.matrix("query_up", linear.weight, queries, source)?;
                self.adapters(linear)?;
            }
        }
        self.adapters(&args.down)?;
        self.norms("norm", &args.norm, columns)?;
        self.norm("latent_norm", &args.latent_norm, latent)?;
        self.matrix("absorb", args.absorb, heads * latent, plain_dim)?;
        self.rope(&args.rope, rows, turned)?;
        self.len("hidden", hidden, rows * columns)?;
        self.len("q", q, rows * heads * (latent + turned))
    }

    /// Gives the rows and columns of one head's matrix.
    pub(crate) fn head_linear(
        &self,
        inputs: &HostInputs,
        linear: &B::Linear,
        heads: usize,
        x: &B::Buffer,
        out: &B::Buffer,
    ) -> Checked<(usize, usize)> {
        let (rows, (outputs, columns)) = (inputs.plan().rows(), (self.matrix)(linear));
        self.that(heads > 0 && outputs.is_multiple_of(heads), || format!("linear: {outputs} rows for {heads} heads"))?;
        self.len("x", x, rows * heads * columns)?;
        self.len("out", out, rows * outputs)?;
        Ok((outputs / heads, columns))
    }

    pub(crate) fn linear_join(
        &self,
        inputs: &HostInputs,
        linear: &Linear<'_, B>,
        join: &Join<'_, B>,
        x: &B::Buffer,
        to: &B::Buffer,
    ) -> Checked {
        let (rows, (outputs, columns)) = (inputs.plan().rows(), (self.matrix)(linear.weight));
        self.adapters(linear)?;
        self.join(join, outputs)?;
        self.len("x", x, rows * columns)?;
        self.len("to", to, rows * outputs)
    }

    /// Gives the width of the activated values.
    pub(crate) fn gate_up(&self, inputs: &HostInputs, args: &GateUpArgs<'_, B>, hidden: &B::Buffer, out: &B::Buffer) -> Checked<usize> {
        let (rows, (outputs, columns)) = (inputs.plan().rows(), (self.matrix)(args.linear.weight));
        let width = if args.gated { outputs / 2 } else { outputs };
        self.that(!args.gated || outputs.is_multiple_of(2), || format!("linear: an odd number of rows, {outputs}"))?;
        let clamped = matches!(args.activation, Activation::ClampedSwiglu { .. });
        self.that(args.gated || !clamped, || "this activation needs a gate".into())?;
        self.that(!args.gated || args.factor.is_none(), || "a gate and a factor".into())?;
        if let Some(factor) = &args.factor {
            self.that(factor.start + width <= factor.stride, || {
                format!("factor: {width} columns from {} on, of {}", factor.start, factor.stride)
            })?;
            self.len("factor", factor.buffer, rows * factor.stride)?;
        }
        self.adapters(&args.linear)?;
        self.norms("norm", &args.norm, columns)?;
        self.len("hidden", hidden, rows * columns)?;
        self.len("out", out, rows * width)?;
        Ok(width)
    }

    /// Gives the width of the hidden state and of an expert's activated values.
    pub(crate) fn moe(
        &self,
        inputs: &HostInputs,
        args: &MoeArgs<'_, B>,
        hidden: &B::Buffer,
        branch: Option<&B::Buffer>,
    ) -> Checked<(usize, usize)> {
        let (rows, experts) = (inputs.plan().rows(), args.routing.experts);
        args.routing.check(self.op)?;
        let ((gate_up, columns), (_, width)) = ((self.matrix)(args.gate_up), (self.matrix)(args.down));
        self.that(gate_up == experts * 2 * width, || format!("gate_up: {gate_up} rows, not {experts} · 2 · {width}"))?;
        self.matrix("down", args.down, experts * columns, width)?;
        self.matrix("router", args.router, experts, columns)?;
        self.norms("norm", args.norm.iter().chain(&args.router_norm), columns)?;
        for buffer in args.correction.iter().chain(&args.expert_scale) {
            self.len("correction or expert_scale", buffer, experts)?;
        }
        if let Some(shared) = &args.shared {
            let (outputs, inner) = (self.matrix)(shared.gate_up.weight);
            self.matrix("shared.gate_up", shared.gate_up.weight, outputs & !1, inner)?;
            self.matrix("shared.gate_up", shared.gate_up.weight, outputs, columns)?;
            self.matrix("shared.down", shared.down.weight, columns, outputs / 2)?;
            self.adapters(&shared.gate_up)?;
            self.adapters(&shared.down)?;
            if let Some(gate) = shared.gate {
                self.matrix("shared.gate", gate, 1, columns)?;
            }
        }
        self.join(&args.join, columns)?;
        self.len("hidden", hidden, rows * columns)?;
        branch.map_or(Ok(()), |branch| self.len("branch", branch, rows * columns))?;
        Ok((columns, width))
    }

    pub(crate) fn logits(&self, inputs: &HostInputs, args: &LogitsArgs<'_, B>, hidden: &B::Buffer, logits: &B::Buffer) -> Checked {
        let (outputs, columns) = (self.matrix)(args.linear);
        self.norms("norm", &args.norm, columns)?;
        self.that(args.softcap.is_none_or(|cap| cap.is_finite() && cap > 0.0), || format!("softcap: {:?}", args.softcap))?;
        self.len("hidden", hidden, inputs.plan().rows() * columns)?;
        self.len("logits", logits, inputs.plan().logit_rows.len() * outputs)
    }
}

impl<B: Backend> QkvArgs<'_, B> {
    /// Rows of the linear.
    pub(crate) fn projected(&self) -> usize {
        let (queries, keys, values) = (self.heads * self.key_dim, self.kv_heads * self.key_dim, self.kv_heads * self.value_dim);
        match self.keys_values {
            KeysValues::Projected => queries + keys + values,
            KeysValues::ValuesAreKeys => queries + keys,
            KeysValues::Elsewhere => queries,
        }
    }
}
