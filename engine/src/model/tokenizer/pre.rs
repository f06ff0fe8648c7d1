//! The named rules by which byte-level tokenizers split text before merging.
//!
//! A file names its rule (`tokenizer.ggml.pre`) instead of carrying it, and some names imply more than a pattern. Only
//! rules that are certain are listed: a wrong one degrades every answer without any error.

/// How text is split, and what else goes with the name.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rule {
    /// Applied one after the other, each to the pieces of the one before.
    pub patterns: &'static [&'static str],
    /// Text is normalised to composed characters first.
    pub nfc: bool,
    /// A piece that is a token is taken whole, whatever the merges say.
    pub ignore_merges: bool,
    /// A beginning-of-sequence token is added unless the metadata says otherwise.
    pub adds_bos: bool,
    /// The metadata's beginning-of-sequence token is not one.
    pub removes_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";
/// As GPT-2, but contractions in any case, one leading symbol to a word, numbers digit by digit, line ends apart.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Qwen 2, but numbers in groups of up to three digits.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const FALCON_MARKS: &str = r"[\p{P}\$\+<=>\^~\|`]+";
const DEFAULT_MARKS: &str = r"[\p{P}\$\+<=>\^~\|]+";
const CJK: &str = r"[一-龥\x{0800}-一가-\x{D7FF}]+";
/// Cased letters as the original lists them, with one space before them. Letters that normalisation would change are
/// written as numbers.
const DEEPSEEK_WORD: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌ\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_MARKS: &str = r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+";
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

const fn split(patterns: &'static [&'static str]) -> Rule {
    Rule { patterns, nfc: false, ignore_merges: false, adds_bos: false, removes_bos: false }
}

const RULES: &[(&[&str], Rule)] = &[
    (&["default"], split(&[DEFAULT_MARKS, GPT2, r"\p{N}+", THREE_DIGITS])),
    (&["gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion"], split(&[GPT2])),
    (&["mpt", "olmo"], Rule { nfc: true, ..split(&[GPT2]) }),
    (&["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"], split(&[DIGIT, GPT2])),
    (&["command-r"], Rule { nfc: true, ..split(&[DIGIT, GPT2]) }),
    (&["falcon"], split(&[FALCON_MARKS, GPT2, THREE_DIGITS])),
    (&["qwen2"], Rule { nfc: true, ..split(&[QWEN2]) }),
    (&["deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"], split(&[QWEN2])),
    (&["qwen35"], Rule { nfc: true, ..split(&[QWEN35]) }),
    (
        &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        Rule { ignore_merges: true, adds_bos: true, ..split(&[LLAMA3]) },
    ),
    (&["dbrx", "smaug-bpe"], split(&[LLAMA3])),
    (&["glm4", "chatglm-bpe"], Rule { removes_bos: true, ..split(&[LLAMA3]) }),
    (&["tekken"], Rule { ignore_merges: true, adds_bos: true, ..split(&[TEKKEN]) }),
    (&["gpt-4o", "llama4", "kanana2"], split(&[GPT4O])),
    (&["deepseek-llm"], split(&[r"[\r\n]", DEEPSEEK_WORD, DEEPSEEK_MARKS, r"\s+$", CJK, r"\p{N}+"])),
    (&["deepseek-coder"], split(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT])),
    (&["deepseek-v3", "hunyuan-dense", "joyai-llm"], split(&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3])),
    (&["bloom", "gpt3-finnish", "poro-chat"], split(&[BLOOM])),
    (&["viking"], split(&[BLOOM, DIGIT])),
];

/// The rule of this name.
pub(super) fn rule(name: &str) -> Option<Rule> {
    RULES.iter().find(|(names, _)| names.contains(&name)).map(|(_, rule)| *rule)
}

/// All names that are understood.
#[must_use]
pub fn pre_tokenizers() -> Vec<&'static str> {
    RULES.iter().flat_map(|(names, _)| names.iter().copied()).collect()
}
