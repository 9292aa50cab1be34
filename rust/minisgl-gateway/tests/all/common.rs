//! HTTP side of a gateway with a test handler, and a fallback server that records its input.

use std::cell::{Cell, RefCell};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use minisgl_gateway::http::{Handler, Head, Options, Outcome, Writer, accept};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::{LocalSet, spawn_local};

/// Timeout that no test reaches.
pub const WAIT: Duration = Duration::from_secs(300);

/// Test handler: `/echo` answers with its body, `/stream` with it byte by byte, `/wait` when notified, `/big` with as
/// many bytes as its body says, `/pass` not at all; all other paths are proxied by their headers.
#[derive(Default)]
pub struct Answers {
    pub go_on: Notify,
    pub waiting: Cell<usize>,
    pub gone: Cell<usize>,
    pub writers: RefCell<Vec<Writer>>,
    pub resumed: Rc<Cell<usize>>,
}

struct Gone<'a>(&'a Answers);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.0.gone.set(self.0.gone.get() + 1);
    }
}

impl Handler for Answers {
    fn route(&self, head: &Head) -> Option<usize> {
        match head.target.as_str() {
            "/panic-route" => panic!("a panic of a test"),
            "/echo" | "/stream" | "/wait" | "/wait-stream" | "/big" | "/pass" | "/panic" => Some(8 << 20),
            "/small" => Some(10),
            _ => None,
        }
    }

    async fn answer(self: Rc<Self>, head: Rc<Head>, body: Bytes, writer: Writer) -> Outcome {
        writer.set_name("req-test");
        match head.target.as_str() {
            "/pass" => return Outcome::Proxy,
            "/panic" => panic!("a panic of a test"),
            "/stream" => {
                writer.begin("text/plain", &[("x-kind", "stream")]);
                body.chunks(1).for_each(|one| writer.part(one));
                writer.end_with(b"");
                return Outcome::Answered;
            }
            "/wait" | "/wait-stream" => {
                if head.target == "/wait-stream" {
                    writer.begin("text/plain", &[]);
                    writer.part(b"begun");
                }
                let gone = Gone(&self);
                self.waiting.set(self.waiting.get() + 1);
                self.writers.borrow_mut().push(writer.clone());
                self.go_on.notified().await;
                std::mem::forget(gone);
                if head.target == "/wait-stream" {
                    writer.end_with(b"");
                    return Outcome::Answered;
                }
            }
            "/big" => {
                let size = std::str::from_utf8(&body).unwrap().parse().unwrap();
                writer.whole(200, "text/plain", &[], &vec![b'x'; size]);
                return Outcome::Answered;
            }
            _ => {}
        }
        writer.whole(200, "text/plain", &[], &body);
        Outcome::Answered
    }
}

/// Input that the fallback server received.
#[derive(Default)]
pub struct Fallback {
    pub received: RefCell<Vec<Vec<u8>>>,
    pub ended: Cell<usize>,
}

pub struct Server {
    pub address: SocketAddr,
    pub options: Rc<Options>,
    pub answers: Rc<Answers>,
    pub fallback: Rc<Fallback>,
    pub log: Rc<RefCell<Vec<String>>>,
    pub socket: PathBuf,
    listener: Option<tokio::task::JoinHandle<()>>,
    accepting: tokio::task::JoinHandle<std::io::Result<()>>,
    _folder: tempfile::TempDir,
}

impl Server {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("fallback");
        let log = Rc::new(RefCell::new(Vec::new()));
        let lines = log.clone();
        let options = Rc::new(Options::new(
            socket.clone(),
            Box::new(move |line| lines.borrow_mut().push(line.to_owned())),
        ));
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        rustix::net::listen(&listener, 4096).unwrap();
        let address = listener.local_addr().unwrap();
        let answers = Rc::new(Answers::default());
        let accepting = spawn_local(accept(listener, answers.clone(), options.clone()));
        let fallback = Rc::default();
        Self {
            address,
            options,
            answers,
            fallback,
            log,
            socket,
            listener: None,
            accepting,
            _folder: folder,
        }
    }

    /// Starts a server with a fallback that reads up to the end of its input, or to `|`, and then writes `answer`.
    pub fn with_fallback(answer: &'static [u8]) -> Self {
        let mut server = Self::start();
        server.serve_fallback(async |mut stream, fallback| {
            let index = fallback.received.borrow().len();
            fallback.received.borrow_mut().push(Vec::new());
            let mut input = [0; 4096];
            let mut has_answered = false;
            while let Ok(size @ 1..) = stream.read(&mut input).await {
                fallback.received.borrow_mut()[index].extend_from_slice(&input[..size]);
                if !has_answered && fallback.received.borrow()[index].contains(&b'|') {
                    has_answered = true;
                    stream.write_all(answer).await.unwrap();
                }
            }
            if !has_answered {
                let _ = stream.write_all(answer).await;
            }
            fallback.ended.set(fallback.ended.get() + 1);
        });
        server
    }

    /// Starts a fallback that runs `script` for each of its connections.
    pub fn serve_fallback(&mut self, script: impl AsyncFn(UnixStream, Rc<Fallback>) + 'static) {
        let script = Rc::new(script);
        let listener = UnixListener::bind(&self.socket).unwrap();
        let fallback = self.fallback.clone();
        self.listener = Some(spawn_local(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (script, fallback) = (script.clone(), fallback.clone());
                spawn_local(async move { script(stream, fallback).await });
            }
        }));
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends `sent` and reads until the server closes.
    pub async fn exchange(&self, sent: &[u8]) -> String {
        let mut stream = self.connect().await;
        stream.write_all(sent).await.unwrap();
        read_all(&mut stream).await
    }

    /// Sends `sent`, closes the sending half, and reads until the server closes.
    pub async fn exchange_half(&self, sent: &[u8]) -> String {
        let mut stream = self.connect().await;
        stream.write_all(sent).await.unwrap();
        stream.shutdown().await.unwrap();
        read_all(&mut stream).await
    }

    pub async fn all_gone(&self) {
        until(|| self.options.counts.open.get() == 0).await;
    }

    pub async fn stopped(&mut self) {
        (&mut self.accepting).await.unwrap().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(listener) = &self.listener {
            listener.abort();
        }
    }
}

pub async fn read_all(stream: &mut TcpStream) -> String {
    let mut found = Vec::new();
    stream.read_to_end(&mut found).await.unwrap();
    String::from_utf8(found).unwrap()
}

pub async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut found = Vec::new();
    while !found.ends_with(end.as_bytes()) {
        let size = stream.read_buf(&mut found).await.unwrap();
        assert!(size > 0, "{}", String::from_utf8_lossy(&found));
    }
    String::from_utf8(found).unwrap()
}

/// Waits until `is_so` is true, polling every millisecond, so that a paused clock advances.
pub async fn until(is_so: impl Fn() -> bool) {
    let begin = std::time::Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < WAIT, "it does not come");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Runs a test on an event loop like the gateway's.
pub fn run<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    LocalSet::new().block_on(&runtime, async {
        tokio::time::timeout(WAIT, test).await.expect("the test takes too long");
    });
}

/// Runs a test with a paused clock, which advances only when all tasks are idle.
pub fn run_without_clock<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    let day = Duration::from_secs(86_400);
    LocalSet::new().block_on(&runtime, async {
        tokio::time::timeout(day, test).await.expect("the test takes too long");
    });
}

pub fn request(method: &str, target: &str, body: &str) -> String {
    let length = if body.is_empty() {
        String::new()
    } else {
        format!("content-length: {}\r\n", body.len())
    };
    format!("{method} {target} HTTP/1.1\r\nhost: localhost\r\n{length}\r\n{body}")
}

pub async fn send(stream: &mut (impl AsyncWriteExt + Unpin), text: String) {
    stream.write_all(text.as_bytes()).await.unwrap();
}

pub fn last(method: &str, target: &str, body: &str) -> String {
    request(method, target, body).replacen("host:", "connection: close\r\nhost:", 1)
}

/// Removes the date header of a response.
pub fn plain(answer: &str) -> String {
    let lines = answer
        .split_inclusive("\r\n")
        .filter(|line| !line.starts_with("date: "));
    lines.collect()
}

/// Runs `test` in a process of its own: it exhausts the process's resources. `name`: path of the calling test.
pub fn alone<F: Future<Output = ()>>(name: &str, test: F) {
    const ALONE: &str = "MINISGL_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return run(test);
    }
    let (_, name) = name.split_once("::").unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", name]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}
