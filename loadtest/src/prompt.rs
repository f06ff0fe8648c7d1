//! What requests ask: text of a wanted size, no two alike from their first word on. Pure.
//!
//! Every prompt is a function of (seed, index), so a run can be repeated exactly, in any order, without keeping its prompts.
//! A serial number comes first: without it a server's prefix cache would answer part of every prompt.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::Error;

/// Serial numbers are distinct below this prime; six digits each, so that every head is equally long.
const SERIALS: u64 = 999_983;
/// Requests of one run have indices below this; warm-up and calibration use those above.
pub const MAX_REQUESTS: usize = 900_000;

const WORDS: &str = "about above across after again air all almost along also always among an and animal another answer any apple around \
as ask at autumn away back bank be bear because become bed before begin behind believe below best better between bird black blue boat \
body book both bottle bottom box boy branch bread break bridge bright bring brother brown build burn business but buy by call came can \
candle car card care carry case castle cat catch cause center certain chair chance change child choose circle city class clean clear climb \
clock close cloud coal coast coat cold color come common company complete consider cook copper corner cost cotton could count country \
course cover cross crowd cry cup current cut dance dark daughter day dead deal dear decide deep desk did different dinner direct distance \
do doctor dog done door down dream dress drink drive drop dry during dust each early earth east easy eat edge effect egg eight either \
electric end engine enough enter equal even evening ever every exact example except eye face fact fair fall family far farm fast father \
fear feather feel few field fight figure fill final find fine finger finish fire first fish five flag flat floor flow flower fly follow \
food foot for force foreign forest form forward found four free fresh friend from front fruit full game garden gate general get gift girl \
give glad glass go gold good government grain grass great green ground group grow guess guide hair half hand happen happy hard harbor hat \
have head hear heart heat heavy help here high hill history hold hole home honest hope horse hot hour house how hundred hunt idea if \
important in inch increase industry inside instrument interest iron island it job join journey judge jump just keep key kind king kitchen \
knee knife know lake lamp land language large last late laugh law lead leaf learn least leave left letter level library lie life light \
like line list listen little live local long look lose loud love low machine main make many map mark market master match material may \
mean measure meet member memory metal middle might mile milk mind mine minute mirror money month moon more morning most mother mountain \
mouth move much music must name narrow nation natural near neck need needle never new news next night nine noise none north nose note \
nothing notice now number object ocean of off office often oil old on once one only open opposite or orange order other our out over own \
page paint pair paper part party pass past path pattern pay peace pencil people perhaps person picture piece place plain plan plane plant \
play please point poor position possible power practice prepare present press pretty price print problem produce product promise proper \
protect prove public pull push put quality question quick quiet rain raise reach read ready real reason receive record red region remember \
repeat reply report rest result rice rich ride right ring rise river road rock room root rope rose round row rule run safe said sail salt \
same sand say scale school science sea season seat second see seed seem sell send sense sentence separate serve set seven several shade \
shape share sharp sheep ship shirt shoe shop shore short should shoulder show side sign silver similar simple since sing single sister sit \
six size skin sky sleep slow small smell smile smoke smooth snow so soap soft soil soldier some song soon sound south space speak special \
speed spell spend spoke spring square stage stand star start state station stay steam steel step stick still stone stop store storm story \
straight strange stream street strong student study subject success such sudden sugar summer sun supply support sure surface surprise swim \
system table tail take talk tall taste teach team tell ten term test than thank that the their them then there these they thick thin thing \
think third this those though thought thousand three through throw thus time tiny to together tomorrow tone too took tool top total touch \
toward town trade train travel tree triangle trip trouble true trust try turn twenty two type under understand unit until up upon use \
usual valley value various very view village visit voice wait walk wall want war warm was wash watch water wave way we wear weather week \
weight well went were west what wheel when where whether which while white who whole why wide wild will win wind window winter wire wise \
wish with woman wonder wood word work world worth would write yard year yellow yes yet you young your";

/// Where words come from.
#[derive(Debug)]
pub struct Source {
    words: Vec<Box<str>>,
    /// Running text is read on from a random place; a word list is drawn from word by word.
    running: bool,
}

impl Source {
    /// Random words of a built-in English list.
    pub fn builtin() -> Source {
        Source { words: WORDS.split_whitespace().map(Into::into).collect(), running: false }
    }

    /// Passages of a text file, each from a random word on, wrapping round.
    pub fn from_file(path: &str) -> Result<Source, Error> {
        let bytes = std::fs::read(path).map_err(|source| Error::Text { path: path.into(), source })?;
        let words: Vec<Box<str>> = String::from_utf8_lossy(&bytes).split_whitespace().map(Into::into).collect();
        if words.len() < 16 {
            return Err(Error::ShortText(path.into()));
        }
        Ok(Source { words, running: true })
    }

    /// About `chars` characters: ends at the word border nearest to it.
    fn text(&self, chars: usize, rng: &mut StdRng) -> String {
        let mut out = String::with_capacity(chars + 16);
        let mut at = rng.random_range(0..self.words.len());
        loop {
            let word = &self.words[at];
            if out.len() + word.len() / 2 >= chars {
                return out;
            }
            if !out.is_empty() {
                out.push(' ');
            }
            out.push_str(word);
            at = if self.running { (at + 1) % self.words.len() } else { rng.random_range(0..self.words.len()) };
        }
    }
}

/// The prompts of a run.
#[derive(Debug)]
pub struct Prompts {
    source: Source,
    seed: u64,
    /// Characters after the serial number.
    body_chars: usize,
    shared: String,
}

impl Prompts {
    pub fn new(source: Source, seed: u64, body_chars: usize) -> Prompts {
        Prompts { source, seed, body_chars, shared: String::new() }
    }

    /// Puts the same text of about `chars` characters before every prompt.
    pub fn share(&mut self, chars: usize) {
        if chars > 0 {
            self.shared = self.source.text(chars, &mut StdRng::seed_from_u64(self.seed ^ 0x7368_6172_6564)) + " ";
        }
    }

    pub fn set_body(&mut self, chars: usize) {
        self.body_chars = chars;
    }

    /// The text that all prompts of [`Prompts::get`] begin with; empty if they share none.
    pub fn shared(&self) -> &str {
        &self.shared
    }

    /// Prompt `index` of the run.
    pub fn get(&self, index: usize) -> String {
        format!("{}{}", self.shared, self.alone(index, self.body_chars))
    }

    /// The same without the shared text and with another size.
    pub fn alone(&self, index: usize, body_chars: usize) -> String {
        let index = index as u64;
        // Steps of a number prime to SERIALS visit every serial once; the seed says where they begin.
        let serial = (index % SERIALS * 7_919 + self.seed % SERIALS) % SERIALS;
        let mut rng = StdRng::seed_from_u64(self.seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        format!("{serial:06} {}", self.source.text(body_chars, &mut rng))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_two_prompts_share_their_first_word() {
        let prompts = Prompts::new(Source::builtin(), u64::MAX - 5, 40);
        let heads: HashSet<String> = (0..20_000).map(|i| prompts.get(i).split(' ').next().unwrap().to_owned()).collect();
        assert_eq!(heads.len(), 20_000);
        let warm = prompts.alone(MAX_REQUESTS, 40);
        assert!(!heads.contains(warm.split(' ').next().unwrap()));
        assert!(heads.iter().all(|head| head.len() == 6));
    }

    #[test]
    fn a_seed_fixes_every_prompt() {
        let make = |seed, index| Prompts::new(Source::builtin(), seed, 200).get(index);
        assert_eq!(make(3, 17), make(3, 17));
        assert_ne!(make(3, 17), make(4, 17));
    }

    #[test]
    fn the_size_is_met_within_a_word() {
        let prompts = Prompts::new(Source::builtin(), 1, 1_000);
        for index in 0..50 {
            let len = prompts.get(index).len();
            assert!((985..=1_025).contains(&len), "{len}");
        }
    }

    #[test]
    fn shared_text_comes_first_and_is_the_same() {
        let mut prompts = Prompts::new(Source::builtin(), 1, 50);
        prompts.share(300);
        let shared = prompts.shared().to_owned();
        assert!((290..=315).contains(&shared.len()));
        assert!((0..20).all(|index| prompts.get(index).starts_with(&shared)));
        assert_ne!(prompts.get(0), prompts.get(1));
        assert!(!prompts.alone(0, 50).starts_with(&shared));
    }

    #[test]
    fn running_text_is_kept_in_order_and_wraps_round() {
        let path = std::env::temp_dir().join(format!("quire-loadtest-{}.txt", std::process::id()));
        let text: Vec<String> = (0..40).map(|i| format!("w{i:02}")).collect();
        std::fs::write(&path, text.join("\n")).unwrap();
        let source = Source::from_file(path.to_str().unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let made = source.text(400, &mut StdRng::seed_from_u64(1));
        let numbers: Vec<usize> = made.split(' ').map(|word| word[1..].parse().unwrap()).collect();
        assert!(numbers.len() > 80 && numbers.windows(2).all(|pair| pair[1] == (pair[0] + 1) % 40));
        assert!(matches!(Source::from_file("/nonexistent/text"), Err(Error::Text { .. })));
    }
}
