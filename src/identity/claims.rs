//! JSON objects in which every name occurs once. Pure; no IO.
//!
//! Parsers disagree on which of two equal names counts, and what two parts of a
//! system read differently, somebody can make use of.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::Refused;

/// The claims of a token, or the parameters of its header.
#[derive(Clone, Debug, PartialEq)]
pub struct Claims(Map<String, Value>);

impl Claims {
    /// Parses one JSON object; `None` when it is none, or a name occurs twice
    /// in it, at any depth.
    pub fn parse(json: &[u8]) -> Option<Self> {
        match serde_json::from_slice::<Strict>(json).ok()?.0 {
            Value::Object(map) => Some(Self(map)),
            _ => None,
        }
    }

    /// A claim, whatever it is.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// A claim that is text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(Value::as_str)
    }

    /// A claim that must be text, and not blank.
    ///
    /// # Errors
    /// [`Refused::Claim`] when it is missing, blank or something else.
    pub fn need_text(&self, name: &str) -> Result<&str, Refused> {
        match self.text(name) {
            Some(text) if !text.trim().is_empty() => Ok(text),
            _ => Err(Refused::Claim(format!("{name} is missing, blank or no text"))),
        }
    }

    /// Seconds since 1970, whole ones.
    ///
    /// # Errors
    /// [`Refused::Claim`] when it is there but no number that fits.
    pub fn seconds(&self, name: &str) -> Result<Option<i64>, Refused> {
        let Some(value) = self.0.get(name) else { return Ok(None) };
        let whole = value.as_i64().or_else(|| {
            let fraction = value.as_f64().filter(|n| (0.0..1e15).contains(n))?;
            #[expect(clippy::cast_possible_truncation, reason = "within bounds; fractions of a second do not matter")]
            Some(fraction as i64)
        });
        whole.map(Some).ok_or_else(|| Refused::Claim(format!("{name} is no number of seconds")))
    }
}

/// JSON that refuses what occurs twice.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Once).map(Self)
    }
}

struct Once;

impl<'de> Visitor<'de> for Once {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Strict(item)) = seq.next_element()? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some((name, Strict(value))) = map.next_entry::<String, _>()? {
            if object.insert(name, value).is_some() {
                return Err(A::Error::custom("a name occurs twice"));
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_occurs_once_at_every_depth() {
        assert!(Claims::parse(br#"{"a":1,"b":[{"a":null}],"c":{"a":1.5}}"#).is_some());
        for bad in [
            r#"{"a":1,"a":1}"#,
            r#"{"a":1,"\u0061":2}"#,
            r#"{"b":{"a":1,"a":2}}"#,
            r#"{"b":[{"a":1,"a":2}]}"#,
            r#"[{"a":1}]"#,
            r#"{"a":1} {}"#,
            "null",
            "",
        ] {
            assert!(Claims::parse(bad.as_bytes()).is_none(), "{bad}");
        }
    }

    #[test]
    fn seconds_are_numbers() {
        let claims = Claims::parse(br#"{"a":1700000000,"b":1700000000.9,"c":"1700000000","d":1e300,"e":-1}"#).unwrap();
        assert_eq!(claims.seconds("a"), Ok(Some(1_700_000_000)));
        assert_eq!(claims.seconds("b"), Ok(Some(1_700_000_000)));
        assert_eq!(claims.seconds("e"), Ok(Some(-1)));
        assert_eq!(claims.seconds("x"), Ok(None));
        for bad in ["c", "d"] {
            assert!(matches!(claims.seconds(bad), Err(Refused::Claim(_))), "{bad}");
        }
    }
}
