//! One direction of a stream: state, and one step of it over sockets that do
//! not block. Knows no reactor and no clock, so that any event loop can drive it.

use std::io;
use std::sync::{Mutex, PoisonError};

/// Bytes of a buffer: two of these a stream are the most that it ever holds.
pub(super) const BUFFER: usize = 32 * 1024;

/// Buffers kept for reuse; more are in use only while readers are slow.
const POOLED: usize = 64;

/// Reads in one step, so that one busy direction does not keep out the rest.
const TURNS: usize = 16;

/// A socket that answers `WouldBlock` instead of waiting.
pub(super) trait Socket {
    /// Reads what is there; `Ok(0)` is the end.
    fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes what fits.
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize>;
    /// Tells the peer that nothing more will be written.
    fn end_write(&self) -> io::Result<()>;
}

/// Buffers shared by all streams. A stream takes one while bytes flow and gives
/// it back when it rests, so that an idle one holds none.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Vec<Vec<u8>>>);

impl Pool {
    pub(crate) fn take(&self) -> Vec<u8> {
        let pooled = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        pooled.unwrap_or_else(|| vec![0; BUFFER])
    }

    pub(crate) fn give(&self, buffer: Vec<u8>) {
        let mut pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if buffer.len() == BUFFER && pool.len() < POOLED {
            pool.push(buffer);
        }
    }
}

/// Which socket of a direction failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The one that is read.
    From(io::Error),
    /// The one that is written.
    To(io::Error),
}

/// What a direction waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wants {
    /// Bytes from its source.
    Read,
    /// Room in its destination. Its source is left alone meanwhile.
    Write,
    /// Nothing: its end has been passed on.
    Nothing,
}

/// One direction.
#[derive(Debug)]
pub(super) struct Half {
    /// Read and not yet written: `buffer[start..end]`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    source_ended: bool,
    ended: bool,
    written: u64,
}

impl Half {
    /// A direction that first writes what was already read.
    pub(super) fn new(replay: Vec<u8>) -> Self {
        Self { end: replay.len(), buffer: replay, start: 0, source_ended: false, ended: false, written: 0 }
    }

    /// Bytes written so far.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn wants(&self) -> Wants {
        match (self.start < self.end, self.ended) {
            (true, _) => Wants::Write,
            (false, false) => Wants::Read,
            (false, true) => Wants::Nothing,
        }
    }

    /// Moves bytes until a socket would block, the source has ended, or others
    /// should have their turn. The end is passed on behind the last byte.
    pub(super) fn step(&mut self, from: &impl Socket, to: &impl Socket, pool: &Pool) -> Result<(), Failure> {
        for _ in 0..TURNS {
            if !self.flush(to, pool).map_err(Failure::To)? || self.ended {
                break;
            }
            if self.source_ended {
                to.end_write().map_err(Failure::To)?;
                self.ended = true;
                break;
            }
            if !self.fill(from, pool).map_err(Failure::From)? {
                break;
            }
        }
        Ok(())
    }

    /// Writes what is left; false when some of it still is.
    fn flush(&mut self, to: &impl Socket, pool: &Pool) -> io::Result<bool> {
        while self.start < self.end {
            match ready(to.try_write(&self.buffer[self.start..self.end]))? {
                Some(0) => return Err(io::ErrorKind::WriteZero.into()),
                Some(count) => {
                    self.start += count;
                    self.written += count as u64;
                }
                None => return Ok(false),
            }
        }
        if !self.buffer.is_empty() {
            pool.give(std::mem::take(&mut self.buffer));
            (self.start, self.end) = (0, 0);
        }
        Ok(true)
    }

    /// Reads once; false when there is nothing to read yet.
    fn fill(&mut self, from: &impl Socket, pool: &Pool) -> io::Result<bool> {
        let mut buffer = pool.take();
        match ready(from.try_read(&mut buffer)) {
            Ok(Some(count @ 1..)) => {
                (self.buffer, self.start, self.end) = (buffer, 0, count);
                Ok(true)
            }
            rest => {
                pool.give(buffer);
                self.source_ended = matches!(rest, Ok(Some(0)));
                rest.map(|count| count.is_some())
            }
        }
    }
}

/// `None` for "not now".
fn ready(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;

    use super::*;

    /// A socket that plays a script: what it has to read, and how much it takes.
    #[derive(Default)]
    struct Script {
        reads: RefCell<VecDeque<io::Result<Vec<u8>>>>,
        room: RefCell<VecDeque<usize>>,
        written: RefCell<Vec<u8>>,
        ended: RefCell<bool>,
        calls: RefCell<usize>,
    }

    impl Socket for Script {
        fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
            *self.calls.borrow_mut() += 1;
            let bytes = self.reads.borrow_mut().pop_front().unwrap_or(Err(io::ErrorKind::WouldBlock.into()))?;
            buffer[..bytes.len()].copy_from_slice(&bytes);
            Ok(bytes.len())
        }

        fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
            assert!(!*self.ended.borrow(), "written behind the end");
            let room = self.room.borrow_mut().pop_front().ok_or(io::ErrorKind::WouldBlock)?;
            let taken = room.min(bytes.len());
            self.written.borrow_mut().extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn end_write(&self) -> io::Result<()> {
            *self.ended.borrow_mut() = true;
            Ok(())
        }
    }

    fn source(reads: Vec<io::Result<Vec<u8>>>) -> Script {
        Script { reads: RefCell::new(reads.into()), ..Script::default() }
    }

    fn sink(room: &[usize]) -> Script {
        Script { room: RefCell::new(room.iter().copied().collect()), ..Script::default() }
    }

    #[test]
    fn the_replay_goes_first_and_the_end_behind_the_last_byte() {
        let (from, to, pool) = (source(vec![Ok(b"more".to_vec()), Ok(vec![])]), sink(&[100; 4]), Pool::default());
        let mut half = Half::new(b"hello ".to_vec());
        assert_eq!(half.wants(), Wants::Write);
        half.step(&from, &to, &pool).unwrap();
        assert_eq!(*to.written.borrow(), b"hello more");
        assert!(*to.ended.borrow());
        assert_eq!((half.wants(), half.written()), (Wants::Nothing, 10));
    }

    #[test]
    fn nothing_is_read_while_the_destination_is_full() {
        let (from, to, pool) = (source(vec![Ok(b"abcdef".to_vec()), Ok(vec![])]), sink(&[2]), Pool::default());
        let mut half = Half::new(Vec::new());
        half.step(&from, &to, &pool).unwrap();
        assert_eq!((half.wants(), half.written()), (Wants::Write, 2));
        half.step(&from, &to, &pool).unwrap();
        assert_eq!(half.written(), 2);
        assert_eq!(*from.calls.borrow(), 1);
        assert!(!*to.ended.borrow(), "the end waits for the bytes before it");
        to.room.borrow_mut().extend([1, 1, 100]);
        half.step(&from, &to, &pool).unwrap();
        assert_eq!(*to.written.borrow(), b"abcdef");
        assert!(*to.ended.borrow());
    }

    #[test]
    fn a_resting_direction_holds_no_buffer() {
        let (from, to, pool) = (source(vec![Ok(b"abc".to_vec())]), sink(&[100]), Pool::default());
        let mut half = Half::new(b"".to_vec());
        half.step(&from, &to, &pool).unwrap();
        assert_eq!(half.wants(), Wants::Read);
        assert_eq!(half.buffer.capacity(), 0);
        assert_eq!(pool.0.lock().unwrap().len(), 1);
    }

    #[test]
    fn one_busy_direction_lets_others_have_their_turn() {
        let reads = (0..TURNS * 2).map(|_| Ok(vec![7; BUFFER])).collect();
        let (from, to, pool) = (source(reads), sink(&[usize::MAX; TURNS * 2]), Pool::default());
        let mut half = Half::new(Vec::new());
        half.step(&from, &to, &pool).unwrap();
        assert!((1..=(TURNS * BUFFER) as u64).contains(&half.written()));
        assert_ne!(half.wants(), Wants::Nothing);
        for _ in 0..2 {
            half.step(&from, &to, &pool).unwrap();
        }
        assert_eq!(half.written(), (TURNS * 2 * BUFFER) as u64);
    }

    #[test]
    fn it_is_known_which_side_failed() {
        let reset = || Err(io::ErrorKind::ConnectionReset.into());
        let (from, to, pool) = (source(vec![Ok(b"last".to_vec()), reset()]), sink(&[100]), Pool::default());
        let failure = Half::new(Vec::new()).step(&from, &to, &pool);
        assert!(matches!(failure, Err(Failure::From(error)) if error.kind() == io::ErrorKind::ConnectionReset));
        assert_eq!(*to.written.borrow(), b"last", "what came before the reset was passed on");
        let failure = Half::new(b"x".to_vec()).step(&source(vec![]), &sink(&[0]), &pool);
        assert!(matches!(failure, Err(Failure::To(_))));
    }
}
