//! The named rules by which byte-level tokenizers split text before merging.
//!
//! A file names its rule (`tokenizer.ggml.pre`) instead of carrying it, and some names imply more than a pattern. Every
//! name that llama.cpp knows is here but `whitespace`, an embedding model's. Patterns are those of the models' own
//! tokenizers where these are known, else what llama.cpp does; all run in time linear in the text, so grouping digits
//! from the right, which the originals do by looking ahead from every digit, is written as several steps.

/// How text is split, and what else goes with the name.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rule {
    /// Applied one after the other, each to the pieces of the one before.
    pub patterns: &'static [&'static str],
    pub spelling: Spelling,
    /// Text is normalised to composed characters first.
    pub nfc: bool,
    /// A piece that is a token is taken whole, whatever the merges say.
    pub ignore_merges: bool,
    /// A beginning-of-sequence token is added unless the metadata says otherwise.
    pub adds_bos: bool,
    /// The metadata's beginning-of-sequence token is not one.
    pub removes_bos: bool,
    /// Files may come without merges: tokens join in the order of their ids.
    pub merges_by_id: bool,
}

/// How the vocabulary writes text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Spelling {
    /// One character for each byte.
    #[default]
    Bytes,
    /// As it is, with `▁` for spaces and `<0x0A>` for bytes that are no token.
    Text,
    /// As `Text`; each `▁` begins a word, and a text begins with one.
    TextWords,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const THREE_DIGITS: &str = "[0-9][0-9][0-9]";
/// As GPT-2, but contractions in any case, one leading symbol to a word, numbers digit by digit, line ends apart.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Qwen 2 without English contractions.
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
/// Words and the single spaces between them are one piece.
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const LINES: &str = r"[^\n]+|\n+";
/// As Qwen 2, but numbers in groups of up to three digits.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As Llama 3, but white space in pieces whose lengths are powers of two.
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// As GPT-4o, but numbers digit by digit.
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU_ASIAN: &str = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+";
/// As GPT-4o, but Han characters apart from other letters.
const KIMI_K2: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const FALCON_MARKS: &str = r"[\p{P}\$\+<=>\^~\|`]+";
const DEFAULT_MARKS: &str = r"[\p{P}\$\+<=>\^~\|]+";
const CJK: &str = r"[一-龥\x{0800}-一가-\x{D7FF}]+";
const HAN_AND_KANA: &str = "[一-龥぀-ゟ゠-ヿ]+";
/// Cased letters as the original lists them, with one space before them. Letters that normalisation would change are
/// written as numbers.
const DEEPSEEK_WORD: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌ\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_MARKS: &str = r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+";
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// As DeepSeek V3, but line ends one by one.
const SPARK: &str =
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const AFMOE_ASIAN: &str = r"[一-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-ゟ゠-ヿ\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}가-\x{D7AF}\x{1100}-\x{11FF}]+";

/// Groups of three from the right, in steps: a whole number; the one or two digits in front of whole groups; groups.
const NUMBER: &str = r"\p{N}+";
const NUMBER_HEAD: &str = r"^\p{N}{1,2}(?=(?:\p{N}{3})+$)";
const NUMBER_GROUP: &str = r"\p{N}{3}";
/// The same, where numbers that run into a word are left to the pattern that follows, which makes the groups.
const BOUNDED_NUMBER: &str = r"(?<!\d)(?>\d+)\b";
const DIGITS_HEAD: &str = r"^\d{1,2}(?=(?:\d{3})+$)";

const fn split(patterns: &'static [&'static str]) -> Rule {
    Rule { patterns, spelling: Spelling::Bytes, nfc: false, ignore_merges: false, adds_bos: false, removes_bos: false, merges_by_id: false }
}

const RULES: &[(&[&str], Rule)] = &[
    (&["default"], split(&[DEFAULT_MARKS, GPT2, r"\p{N}+", THREE_DIGITS])),
    (
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-code",
            "jina-v2-de",
            "jina-v2-es",
            "roberta-bpe",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "jais",
            "trillion",
            "granite-docling",
        ],
        split(&[GPT2]),
    ),
    (&["mpt", "olmo", "modern-bert"], Rule { nfc: true, ..split(&[GPT2]) }),
    (&["jais-2"], split(&[JAIS2])),
    (&["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"], split(&[DIGIT, GPT2])),
    (&["command-r"], Rule { nfc: true, ..split(&[DIGIT, GPT2]) }),
    (&["falcon"], split(&[FALCON_MARKS, GPT2, THREE_DIGITS])),
    (&["qwen2"], Rule { nfc: true, ..split(&[QWEN2]) }),
    (&["deepseek-r1-qwen", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"], split(&[QWEN2])),
    (&["qwen35"], Rule { nfc: true, ..split(&[QWEN35]) }),
    (&["ufakzeka"], split(&[UFAKZEKA])),
    (&["laguna"], split(&[LINES, QWEN2])),
    (&["seed-coder"], split(&[SEED_CODER])),
    (&["bailingmoe", "bailingmoe2", "llada-moe"], split(&[BAILING])),
    (&["exaone-moe"], split(&[EXAONE_MOE])),
    (
        &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
        Rule { ignore_merges: true, adds_bos: true, ..split(&[LLAMA3]) },
    ),
    (&["dbrx", "smaug-bpe"], split(&[LLAMA3])),
    (&["chatglm-bpe"], Rule { removes_bos: true, ..split(&[LLAMA3]) }),
    (&["glm4", "glm5"], Rule { removes_bos: true, ignore_merges: true, ..split(&[LLAMA3]) }),
    (&["minicpm5"], Rule { ignore_merges: true, ..split(&[r"\p{N}{1,3}", MINICPM5]) }),
    (&["tekken"], Rule { ignore_merges: true, adds_bos: true, ..split(&[TEKKEN]) }),
    (&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], split(&[GPT4O])),
    (&["granite-embed-multi-97m"], Rule { ignore_merges: true, ..split(&[GPT4O]) }),
    (&["tiny_aya", "cohere2moe"], split(&[BOUNDED_NUMBER, DIGITS_HEAD, GPT4O])),
    (&["kimi-k2"], Rule { merges_by_id: true, ..split(&[KIMI_K2]) }),
    (&["youtu"], Rule { ignore_merges: true, ..split(&[YOUTU_ASIAN, YOUTU]) }),
    (&["superbpe"], split(&[NUMBER, r"\d+", DIGITS_HEAD, r"\d{3}"])),
    (&["afmoe"], split(&[NUMBER, NUMBER_HEAD, NUMBER_GROUP, AFMOE_ASIAN, DEEPSEEK_V3])),
    (
        &["chameleon"],
        Rule {
            adds_bos: true,
            ..split(&[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ])
        },
    ),
    (&["deepseek-llm"], split(&[r"[\r\n]", DEEPSEEK_WORD, DEEPSEEK_MARKS, r"\s+$", CJK, r"\p{N}+"])),
    (&["deepseek-coder"], split(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT])),
    (&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], split(&[r"\p{N}{1,3}", HAN_AND_KANA, DEEPSEEK_V3])),
    (&["spark2_5"], split(&[r"\p{N}{1,3}", HAN_AND_KANA, SPARK, DIGIT])),
    (&["bloom", "gpt3-finnish", "poro-chat"], split(&[BLOOM])),
    (&["viking"], split(&[BLOOM, DIGIT])),
    (&["gemma4", "granite-embed-multi-311m"], Rule { spelling: Spelling::Text, adds_bos: true, ..split(&[]) }),
    (&["sarvam-moe"], Rule { spelling: Spelling::Text, ..split(&[LINES]) }),
    (&["mmbert"], Rule { spelling: Spelling::TextWords, ..split(&[LINES]) }),
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
