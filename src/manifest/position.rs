//! Which line of a YAML document holds what: for messages. It reads block
//! style; what stands within a flow collection has the line of its key.

use std::collections::BTreeMap;

/// Lines by path. A path's steps are keys, and indexes of sequences.
#[derive(Clone, Debug, Default)]
pub(crate) struct Positions(BTreeMap<Vec<String>, usize>);

/// One open block collection.
struct Frame {
    column: usize,
    sequence: Option<usize>,
    step: String,
}

/// What the coming lines continue.
enum Within {
    Nothing,
    /// A block scalar whose parent begins at this column.
    Block(usize),
    /// A flow collection or quoted scalar that is still open.
    Flow(Flow),
}

#[derive(Default)]
struct Flow {
    depth: usize,
    quote: Option<char>,
}

impl Positions {
    /// Reads one document. Lines count from 1.
    pub(crate) fn of(text: &str) -> Self {
        let mut index = Indexer { frames: Vec::new(), within: Within::Nothing, lines: BTreeMap::new() };
        for (number, line) in text.lines().enumerate() {
            index.line(number + 1, line);
        }
        Self(index.lines)
    }

    /// The line of a path, or of its nearest ancestor that has one.
    pub(crate) fn line<S: AsRef<str>>(&self, path: &[S]) -> usize {
        let path: Vec<String> = path.iter().map(|step| step.as_ref().to_owned()).collect();
        (0..=path.len()).rev().find_map(|end| self.0.get(&path[..end])).copied().unwrap_or(1)
    }
}

struct Indexer {
    frames: Vec<Frame>,
    within: Within,
    lines: BTreeMap<Vec<String>, usize>,
}

impl Indexer {
    fn line(&mut self, number: usize, line: &str) {
        let content = line.trim_start_matches(' ');
        let mut column = line.len() - content.len();
        match &mut self.within {
            Within::Block(parent) if content.trim().is_empty() || column > *parent => return,
            Within::Flow(flow) => {
                flow.scan(content);
                if flow.closed() {
                    self.within = Within::Nothing;
                }
                return;
            }
            _ => self.within = Within::Nothing,
        }
        let mut content = content.trim_end();
        if content.is_empty() || content.starts_with('#') || content.starts_with("---") {
            return;
        }
        self.lines.entry(Vec::new()).or_insert(number);
        while content == "-" || content.starts_with("- ") {
            self.item(number, column);
            let rest = content[1..].trim_start();
            column += content.len() - rest.len();
            content = rest;
            if rest.is_empty() || rest.starts_with('#') {
                return;
            }
            if rest.starts_with(['|', '>']) {
                self.within = Within::Block(self.frames.last().map_or(0, |frame| frame.column));
                return;
            }
        }
        match split_key(content) {
            Some((key, value)) => {
                self.key(number, column, key);
                self.value(column, value);
            }
            None => self.value(column, content),
        }
    }

    fn item(&mut self, number: usize, column: usize) {
        self.frames.retain(|frame| frame.column <= column);
        match self.frames.last_mut() {
            Some(Frame { column: at, sequence: Some(index), step }) if *at == column => {
                *index += 1;
                *step = index.to_string();
            }
            _ => self.frames.push(Frame { column, sequence: Some(0), step: "0".to_owned() }),
        }
        self.record(number);
    }

    fn key(&mut self, number: usize, column: usize, key: String) {
        self.frames.retain(|frame| frame.column < column || (frame.column == column && frame.sequence.is_none()));
        match self.frames.last_mut() {
            Some(frame) if frame.column == column => frame.step = key,
            _ => self.frames.push(Frame { column, sequence: None, step: key }),
        }
        self.record(number);
    }

    fn value(&mut self, column: usize, value: &str) {
        if value.starts_with(['|', '>']) {
            self.within = Within::Block(column);
        } else if value.starts_with(['{', '[', '"', '\'']) {
            let mut flow = Flow::default();
            flow.scan(value);
            if !flow.closed() {
                self.within = Within::Flow(flow);
            }
        }
    }

    fn record(&mut self, number: usize) {
        let path = self.frames.iter().map(|frame| frame.step.clone()).collect();
        self.lines.entry(path).or_insert(number);
    }
}

impl Flow {
    fn scan(&mut self, text: &str) {
        let mut chars = text.chars();
        let mut before = ' ';
        while let Some(c) = chars.next() {
            match (self.quote, c) {
                (Some('"'), '\\') => drop(chars.next()),
                (Some(quote), _) if c == quote => self.quote = None,
                (Some(_), _) => {}
                (None, '"' | '\'') if !before.is_alphanumeric() => self.quote = Some(c),
                (None, '[' | '{') => self.depth += 1,
                (None, ']' | '}') => self.depth = self.depth.saturating_sub(1),
                (None, '#') if before == ' ' => return,
                _ => {}
            }
            before = c;
        }
    }

    fn closed(&self) -> bool {
        self.depth == 0 && self.quote.is_none()
    }
}

/// `key: value`, with the quotes of the key gone.
fn split_key(content: &str) -> Option<(String, &str)> {
    if content.starts_with(['{', '[', '#']) {
        return None;
    }
    let after = |rest: &str| rest.is_empty() || rest.starts_with(' ');
    if let Some(quote @ ('"' | '\'')) = content.chars().next() {
        let end = content[1..].find(quote)? + 1;
        let rest = content[end + 1..].trim_start().strip_prefix(':')?;
        return after(rest).then(|| (content[1..end].to_owned(), rest.trim_start()));
    }
    let colon = content.match_indices(':').map(|(at, _)| at).find(|at| after(&content[at + 1..]))?;
    Some((content[..colon].trim_end().to_owned(), content[colon + 1..].trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_of_block_style_has_its_line() {
        let text = "\
# a comment
a:
  b: 1
  'c d': |
    e: not a key
    f: nor this

  g:
  - x: 1
    y: 2
  - - z
    - w: {p: 1,
          q: 2}
    - \"quoted: not a key
       n: neither\"
h: [1, 2] # h: 3
i: end
";
        let positions = Positions::of(text);
        for (path, line) in [
            (vec![], 2),
            (vec!["a"], 2),
            (vec!["a", "b"], 3),
            (vec!["a", "c d"], 4),
            (vec!["a", "e"], 2),
            (vec!["a", "g"], 8),
            (vec!["a", "g", "0"], 9),
            (vec!["a", "g", "0", "x"], 9),
            (vec!["a", "g", "0", "y"], 10),
            (vec!["a", "g", "1", "0"], 11),
            (vec!["a", "g", "1", "1", "w"], 12),
            (vec!["a", "g", "1", "1", "w", "q"], 12),
            (vec!["a", "g", "1", "2"], 14),
            (vec!["h"], 16),
            (vec!["h", "1"], 16),
            (vec!["i"], 17),
        ] {
            assert_eq!(positions.line(&path), line, "{path:?}");
        }
    }

    #[test]
    fn carriage_returns_change_nothing() {
        let positions = Positions::of("a:\r\n  - b: 1\r\n  - c: 2\r\n");
        assert_eq!(positions.line(&["a", "1", "c"]), 3);
    }
}
