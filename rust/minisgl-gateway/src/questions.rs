//! Questions to Python: for each POST, what to do with it, asked once.
//!
//! Invariants: a question is answered once, or withdrawn when its client disconnects, which stops Python's work; Python
//! is woken when there is something to take, and takes all of it; no thread of the gateway waits for the interpreter.

use std::collections::HashMap;
use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::http::Head;
use crate::message::prepared::Prepared;
use crate::waiting::Reservations;

/// Python's result, with the queue reservations of its choices.
pub type Reply = (Prepared, Option<Reservations>);

/// A request as Python is asked about it.
#[derive(Clone, Debug)]
pub struct Question {
    /// Id of the question, for its answer.
    pub number: u64,
    /// HTTP method of the request, `POST`.
    pub method: String,
    /// Request target as it was sent, with the query.
    pub target: String,
    /// Headers in order, with names in lower case.
    pub headers: Vec<(String, Bytes)>,
    /// Request body. `None`: the question is whether the caller may send a body of the length that the headers give.
    pub body: Option<Bytes>,
}

#[derive(Default)]
struct State {
    next: u64,
    waiting: Vec<Question>, // in the order of their ids
    withdrawn: Vec<u64>,
    senders: HashMap<u64, oneshot::Sender<Reply>>,
    closed: bool,
}

impl State {
    /// Returns true if there is neither a question nor a withdrawal for Python to take.
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.withdrawn.is_empty()
    }
}

/// Queue of questions to Python, shared by the gateway's thread and Python's.
pub struct Questions {
    state: Mutex<State>,
    wake: UnixStream,
    woken: UnixStream,
}

impl Questions {
    /// Makes an empty queue and its wake-up socket pair.
    pub fn new() -> io::Result<Questions> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        Ok(Questions {
            state: Mutex::default(),
            wake,
            woken,
        })
    }

    /// Returns the socket that is readable when there is a question. Empty it before taking the questions.
    pub fn woken(&self) -> &UnixStream {
        &self.woken
    }

    /// Asks Python and waits for its result. `None` if the queue is closed. Dropping the future withdraws the question.
    pub async fn ask(self: &Arc<Self>, head: &Head, body: Option<Bytes>) -> Option<Reply> {
        let (sender, receiver) = oneshot::channel();
        let number = self.add(head, body, sender)?;
        let _guard = WithdrawGuard(Arc::clone(self), number);
        receiver.await.ok()
    }

    fn add(&self, head: &Head, body: Option<Bytes>, sender: oneshot::Sender<Reply>) -> Option<u64> {
        let mut state = lock(&self.state);
        if state.closed {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.senders.insert(number, sender);
        let is_first = state.is_empty();
        state.waiting.push(Question {
            number,
            method: head.method.clone(),
            target: head.target.clone(),
            headers: head.headers.clone(),
            body,
        });
        drop(state);
        self.wake(is_first);
        Some(number)
    }

    fn wake(&self, is_first: bool) {
        if is_first {
            let _ = (&self.wake).write(&[1]); // an error means that the socket is full: Python is woken already
        }
    }

    /// Takes the ids of withdrawn questions, which Python may have taken before or will take with the next `take`.
    pub fn withdrawn(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.state).withdrawn)
    }

    /// Takes all waiting questions to Python, in the order of their ids.
    pub fn take(&self) -> Vec<Question> {
        std::mem::take(&mut lock(&self.state).waiting)
    }

    /// Answers question `number` with `make()`. Returns false, without calling `make`, if the question was withdrawn.
    pub fn answer(&self, number: u64, make: impl FnOnce() -> Reply) -> bool {
        let sender = lock(&self.state).senders.remove(&number);
        sender.is_some_and(|sender| sender.send(make()).is_ok())
    }

    /// Closes the queue: waiting and later questions get no answer.
    pub fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.waiting.clear();
        state.withdrawn.clear();
        let senders = std::mem::take(&mut state.senders);
        drop(state);
        drop(senders);
    }
}

/// Guard that withdraws a question on drop, unless it was answered.
struct WithdrawGuard(Arc<Questions>, u64);

impl Drop for WithdrawGuard {
    fn drop(&mut self) {
        let (questions, number) = (&self.0, self.1);
        let mut state = lock(&questions.state);
        if state.senders.remove(&number).is_none() {
            return;
        }
        let is_first = state.is_empty();
        state.withdrawn.push(number);
        if let Ok(at) = state.waiting.binary_search_by_key(&number, |one| one.number) {
            state.waiting[at].body = None; // frees the body, which may be large
        }
        drop(state);
        questions.wake(is_first);
    }
}

/// Locks a mutex and ignores poisoning: no code that panics leaves the data inconsistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Read as _;

    use super::*;

    fn head() -> Head {
        Head {
            raw: Bytes::new(),
            method: "POST".to_owned(),
            target: "/generate".to_owned(),
            headers: Vec::new(),
            content_length: 0,
            keep_alive: true,
        }
    }

    fn woken(questions: &Questions) -> usize {
        (&mut &questions.woken).read(&mut [0; 64]).unwrap_or(0)
    }

    #[tokio::test]
    async fn python_is_woken_once_for_all_questions() {
        let questions = Arc::new(Questions::new().unwrap());
        let ask = |text: &'static [u8]| {
            let questions = Arc::clone(&questions);
            async move { questions.ask(&head(), Some(Bytes::from_static(text))).await }
        };
        let answering = async {
            let taken = questions.take();
            assert_eq!(woken(&questions), 1, "two questions, one byte");
            assert_eq!(taken.len(), 2);
            for one in taken.iter().rev() {
                let is_first = one.body.as_deref() == Some(b"a");
                let answer = if is_first { Prepared::Read } else { Prepared::PassOn };
                assert!(questions.answer(one.number, || (answer, None)));
            }
            assert!(!questions.answer(99, || panic!("it is nobody's")));
        };
        let (first, second, ()) = tokio::join!(ask(b"a"), ask(b"b"), answering);
        assert_eq!(
            (first.unwrap().0, second.unwrap().0),
            (Prepared::Read, Prepared::PassOn)
        );
    }

    #[tokio::test]
    async fn disconnect_withdraws_and_close_ends_questions() {
        let questions = Arc::new(Questions::new().unwrap());
        let head = head();
        let left = tokio::time::timeout(std::time::Duration::ZERO, questions.ask(&head, None));
        assert!(left.await.is_err());
        assert_eq!(
            (questions.withdrawn(), questions.take().len()),
            (vec![0], 1),
            "Python hears of it"
        );
        assert_eq!(woken(&questions), 1);
        let closing = async { questions.close() };
        let (reply, ()) = tokio::join!(questions.ask(&head, None), closing);
        assert!(reply.is_none());
        assert!(questions.ask(&head, None).await.is_none(), "from now on");
    }
}
