//! Writes small GGUF files, good and bad ones.

#![allow(dead_code)]

/// A metadata value as its type number and bytes.
pub struct Value(pub u32, pub Vec<u8>);

impl Value {
    pub fn u32(value: u32) -> Self {
        Self(4, value.to_le_bytes().into())
    }

    pub fn f32(value: f32) -> Self {
        Self(6, value.to_le_bytes().into())
    }

    pub fn bool(value: bool) -> Self {
        Self(7, vec![value.into()])
    }

    pub fn string(value: &str) -> Self {
        Self(8, text(value))
    }

    pub fn array(element: u32, items: &[Vec<u8>]) -> Self {
        let mut bytes = element.to_le_bytes().to_vec();
        bytes.extend((items.len() as u64).to_le_bytes());
        bytes.extend(items.concat());
        Self(9, bytes)
    }

    pub fn strings<S: AsRef<str>>(items: &[S]) -> Self {
        Self::array(8, &items.iter().map(|item| text(item.as_ref())).collect::<Vec<_>>())
    }

    pub fn floats(items: &[f32]) -> Self {
        Self::array(6, &items.iter().map(|item| item.to_le_bytes().into()).collect::<Vec<_>>())
    }

    pub fn ints(items: &[i32]) -> Self {
        Self::array(5, &items.iter().map(|item| item.to_le_bytes().into()).collect::<Vec<_>>())
    }
}

fn text(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend(value.as_bytes());
    bytes
}

pub struct Tensor {
    pub name: String,
    pub dimensions: Vec<u64>,
    pub tensor_type: u32,
    /// `None`: behind the tensor before it.
    pub offset: Option<u64>,
    pub data: Vec<u8>,
}

pub struct Writer {
    pub version: u32,
    pub alignment: usize,
    pub keys: Vec<(String, Value)>,
    pub tensors: Vec<Tensor>,
    /// What the header claims, if not the truth.
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
}

impl Default for Writer {
    fn default() -> Self {
        Self { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new(), tensor_count: None, key_count: None }
    }
}

impl Writer {
    pub fn key(mut self, name: &str, value: Value) -> Self {
        self.keys.push((name.to_owned(), value));
        self
    }

    /// A key that may be there already.
    pub fn set(mut self, name: &str, value: Value) -> Self {
        self.keys.retain(|(key, _)| key != name);
        self.key(name, value)
    }

    pub fn f32_tensor(self, name: &str, dimensions: &[u64]) -> Self {
        let count: u64 = dimensions.iter().product();
        let data = (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect();
        self.tensor(name, dimensions, 0, data)
    }

    pub fn tensor(mut self, name: &str, dimensions: &[u64], tensor_type: u32, data: Vec<u8>) -> Self {
        self.tensors.push(Tensor { name: name.to_owned(), dimensions: dimensions.to_vec(), tensor_type, offset: None, data });
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (name, Value(value_type, bytes)) in &self.keys {
            out.extend(text(name));
            out.extend(value_type.to_le_bytes());
            out.extend(bytes);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            out.extend(text(&tensor.name));
            out.extend((tensor.dimensions.len() as u32).to_le_bytes());
            tensor.dimensions.iter().for_each(|size| out.extend(size.to_le_bytes()));
            out.extend(tensor.tensor_type.to_le_bytes());
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}
