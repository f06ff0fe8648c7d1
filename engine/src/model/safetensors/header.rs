//! One file: header → tensors.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer as _,
    de::{self, MapAccess, Visitor},
};

use super::{Dtype, SafetensorsError};

/// Headers of real models have some tens of megabytes at most; this is the format's own limit.
const LONGEST_HEADER: u64 = 100_000_000;
/// `"":{"dtype":"U8","shape":[],"data_offsets":[0,0]},`
const LEAST_ENTRY: usize = 48;
/// No model has tensors of more dimensions.
const MOST_DIMENSIONS: usize = 8;

/// A tensor in a file whose place has been checked.
#[derive(Clone, Debug)]
pub struct StoredTensor<'a> {
    pub name: Cow<'a, str>,
    pub dtype: Dtype,
    /// Outermost first: rows before columns.
    pub shape: Vec<usize>,
    pub data: &'a [u8],
}

impl StoredTensor<'_> {
    #[must_use]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// What one safetensors file holds; borrows its bytes.
#[derive(Debug)]
pub struct Safetensors<'a> {
    /// By name.
    tensors: Vec<StoredTensor<'a>>,
}

impl<'a> Safetensors<'a> {
    /// Reads and checks a whole file in memory.
    ///
    /// # Errors
    /// [`SafetensorsError`] names the tensor and the field.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, SafetensorsError> {
        let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
            return Err(SafetensorsError::Truncated(format!("it has {} bytes, fewer than its header's length takes", bytes.len())));
        };
        let length = u64::from_le_bytes(*length);
        if length > LONGEST_HEADER {
            return Err(SafetensorsError::Header(format!("it says that its header has {length} bytes; {LONGEST_HEADER} are allowed")));
        }
        // Within the limit, so it fits.
        let Some((header, data)) = rest.split_at_checked(length as usize) else {
            return Err(SafetensorsError::Truncated(format!("its header has {length} bytes, but {} are left", rest.len())));
        };
        let claims = read_header(header)?;
        check_coverage(&claims, data.len())?;
        let mut tensors = claims.into_iter().map(|claim| claim.place(data)).collect::<Result<Vec<_>, _>>()?;
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(SafetensorsError::tensor(&pair[0].name, "stands in the header twice"));
        }
        Ok(Self { tensors })
    }

    /// By name.
    #[must_use]
    pub fn tensors(&self) -> &[StoredTensor<'a>] {
        &self.tensors
    }

    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&StoredTensor<'a>> {
        self.tensors.binary_search_by(|tensor| tensor.name.as_ref().cmp(name)).ok().map(|index| &self.tensors[index])
    }

    pub(super) fn into_tensors(self) -> Vec<StoredTensor<'a>> {
        self.tensors
    }
}

/// A tensor as the header describes it.
struct Claim<'a> {
    name: Cow<'a, str>,
    dtype: Cow<'a, str>,
    shape: Shape,
    offsets: (u64, u64),
}

impl<'a> Claim<'a> {
    fn place(self, data: &'a [u8]) -> Result<StoredTensor<'a>, SafetensorsError> {
        let fail = |problem: String| SafetensorsError::tensor(&self.name, problem);
        let dtype = Dtype::from_name(&self.dtype)
            .ok_or_else(|| fail(format!("field `dtype`: `{}` is no known type", crate::model::gguf::clip(&self.dtype))))?;
        let (begin, end) = self.offsets;
        let place = usize::try_from(begin).ok().zip(usize::try_from(end).ok()).and_then(|(begin, end)| data.get(begin..end));
        let Some(place) = place else {
            return Err(fail(format!(
                "field `data_offsets`: [{begin}, {end}] lies outside the {} bytes of data; the file is cut short or damaged: download it again",
                data.len()
            )));
        };
        let shape: Option<Vec<usize>> = self.shape.0.iter().map(|size| usize::try_from(*size).ok()).collect();
        let bytes = shape.as_ref().and_then(|shape| shape.iter().try_fold(dtype.bytes(), |bytes, size| bytes.checked_mul(*size)));
        match (shape, bytes) {
            (Some(shape), Some(bytes)) if bytes == place.len() => Ok(StoredTensor { name: self.name, dtype, shape, data: place }),
            _ => Err(fail(format!(
                "fields `shape` and `data_offsets` disagree: {:?} of {} does not take {} bytes",
                self.shape.0,
                dtype.name(),
                place.len()
            ))),
        }
    }
}

/// Data without holes or overlaps, from the first byte to the last.
fn check_coverage(claims: &[Claim<'_>], data: usize) -> Result<(), SafetensorsError> {
    let mut order: Vec<u32> = (0..claims.len() as u32).collect();
    order.sort_unstable_by_key(|index| claims[*index as usize].offsets);
    let mut at = 0;
    for index in order {
        let claim = &claims[index as usize];
        let (begin, end) = claim.offsets;
        if begin != at || end < begin {
            let problem = format!("field `data_offsets`: [{begin}, {end}] leaves a hole or overlaps; the next tensor must start at {at}");
            return Err(SafetensorsError::tensor(&claim.name, problem));
        }
        at = end;
    }
    if at == data as u64 {
        return Ok(());
    }
    Err(SafetensorsError::Truncated(format!("its tensors take {at} bytes of data, but it has {data}")))
}

fn read_header(header: &[u8]) -> Result<Vec<Claim<'_>>, SafetensorsError> {
    let text = std::str::from_utf8(header).map_err(|_| SafetensorsError::Header("its header is not UTF-8".to_owned()))?;
    let mut json = serde_json::Deserializer::from_str(text);
    let claims = json.deserialize_map(Header { capacity: header.len() / LEAST_ENTRY }).and_then(|claims| json.end().map(|()| claims));
    claims.map_err(|error| SafetensorsError::Header(format!("its header does not read: {error}")))
}

struct Header {
    capacity: usize,
}

impl<'a> Visitor<'a> for Header {
    type Value = Vec<Claim<'a>>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("tensors by name")
    }

    fn visit_map<M: MapAccess<'a>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut claims = Vec::with_capacity(self.capacity);
        while let Some(name) = map.next_key::<Text<'a>>()? {
            if name.0 == "__metadata__" {
                map.next_value::<de::IgnoredAny>()?;
                continue;
            }
            let entry: Entry<'a> =
                map.next_value().map_err(|error| de::Error::custom(format!("tensor `{}`: {error}", crate::model::gguf::clip(&name.0))))?;
            let offsets = (entry.data_offsets[0], entry.data_offsets[1]);
            claims.push(Claim { name: name.0, dtype: entry.dtype.0, shape: entry.shape, offsets });
        }
        Ok(claims)
    }
}

#[derive(Deserialize)]
struct Entry<'a> {
    #[serde(borrow)]
    dtype: Text<'a>,
    shape: Shape,
    data_offsets: [u64; 2],
}

/// A string that is borrowed where the JSON needs no unescaping.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Borrowed;
        impl<'de> Visitor<'de> for Borrowed {
            type Value = Text<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string")
            }

            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Borrowed)
    }
}

/// A short list of sizes: a long one is refused before it is kept.
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("field `shape`: a list of sizes")
            }

            fn visit_seq<S: de::SeqAccess<'de>>(self, mut list: S) -> Result<Shape, S::Error> {
                let mut sizes = [0; MOST_DIMENSIONS];
                let mut rank = 0;
                while let Some(size) = list.next_element()? {
                    *sizes.get_mut(rank).ok_or_else(|| de::Error::custom("field `shape`: more than 8 dimensions"))? = size;
                    rank += 1;
                }
                Ok(Shape(sizes[..rank].to_vec()))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}
