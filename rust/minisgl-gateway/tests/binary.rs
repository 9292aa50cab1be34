//! The gateway as a process: its options, its port, its end.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

const WAIT: Duration = Duration::from_secs(30);

fn gateway(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_minisgl-gateway"));
    command.args(arguments).stderr(Stdio::piped()).stdout(Stdio::piped());
    command
}

fn output(arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = gateway(arguments).output().unwrap();
    (
        status.code().unwrap(),
        String::from_utf8(stdout).unwrap(),
        String::from_utf8(stderr).unwrap(),
    )
}

#[test]
fn help_and_version() {
    let (code, help, _) = output(&["--help"]);
    assert!(code == 0 && help.contains("--engine ipc://PATH") && help.lines().all(|line| line.len() <= 120));
    assert_eq!(
        output(&["--version"]).1,
        concat!("minisgl-gateway ", env!("CARGO_PKG_VERSION"), "\n")
    );
}

#[test]
fn wrong_options_are_named_with_their_values() {
    let both = [
        "--engine",
        "ipc:///nowhere/engine",
        "--fallback",
        "unix:///nowhere/http",
    ];
    for (arguments, said) in [
        (&[][..], "--engine: missing"),
        (&["--engine", "ipc://a"], "--fallback: missing"),
        (&["--engine", "tcp://a"], "--engine tcp://a: must be ipc://PATH"),
        (&["--fallback", "unix://"], "--fallback unix://: must be unix://PATH"),
        (&["--port", "65536"], "--port 65536: must be a number from 0 to 65535"),
        (&["--port"], "--port: needs a value"),
        (&["--por", "1"], "--por"),
        (&["serve"], "serve: not expected"),
    ] {
        let (code, stdout, stderr) = output(arguments);
        assert!(
            code == 2 && stdout.is_empty() && stderr.starts_with("minisgl-gateway: "),
            "{stderr}"
        );
        assert!(stderr.contains(said) && stderr.lines().count() == 1, "{stderr}");
    }
    let (code, _, stderr) = output(&[&both[..], &["--host", "no.such.host.invalid", "--port", "5"]].concat());
    assert!(
        code == 1 && stderr.contains("--host no.such.host.invalid --port 5: "),
        "{stderr}"
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gateway.json");
    std::fs::write(&file, "{\"model_name\": 1}").unwrap();
    let file = file.to_str().unwrap();
    let (code, _, stderr) = output(&[&both[..], &["--port", "0", "--config", file]].concat());
    assert!(code == 1 && stderr.contains(&format!("--config {file}: ")), "{stderr}");
}

/// A gateway in front of nothing, with what it says.
struct Running {
    child: Child,
    lines: BufReader<ChildStderr>,
    address: String,
    folder: tempfile::TempDir,
}

impl Running {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |scheme: &str, name| format!("{scheme}{}", folder.path().join(name).display());
        let (engine, fallback) = (path("ipc://", "engine"), path("unix://", "http"));
        let mut child = gateway(&["--engine", &engine, "--fallback", &fallback, "--port", "0"])
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("minisgl-gateway: http://").unwrap().to_owned();
        Self {
            child,
            lines,
            address,
            folder,
        }
    }

    fn ask(&self, target: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        let sent = format!("GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        stream.write_all(sent.as_bytes()).unwrap();
        stream
    }

    fn answer(&self, target: &str) -> String {
        let mut found = String::new();
        self.ask(target).read_to_string(&mut found).unwrap();
        found
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn alone_it_is_alive_and_says_what_is_missing() {
    let mut running = Running::start();
    assert!(running.answer("/livez").starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(running.answer("/v1/models").starts_with("HTTP/1.1 503 "));
    let listener = UnixListener::bind(running.folder.path().join("http")).unwrap();
    let mut asked = running.ask("/v1/models");
    let mut stream = listener.accept().unwrap().0;
    let mut input = [0; 1000];
    let size = stream.read(&mut input).unwrap();
    assert!(input[..size].starts_with(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"));
    stream
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        .unwrap();
    let mut found = String::new();
    asked.read_to_string(&mut found).unwrap();
    assert!(found.ends_with("\r\n\r\nok"));
    running.signal(Signal::TERM);
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
}

#[test]
fn what_is_under_way_ends_unless_a_second_signal_comes() {
    let mut running = Running::start();
    let listener = UnixListener::bind(running.folder.path().join("http")).unwrap();
    let (mut asked, _endless) = (running.ask("/one"), running.ask("/two"));
    let (mut one, mut two) = (listener.accept().unwrap().0, listener.accept().unwrap().0);
    let mut input = [0; 1000];
    for stream in [&mut one, &mut two] {
        assert!(stream.read(&mut input).unwrap() > 0);
    }
    if input.starts_with(b"GET /one ") {
        std::mem::swap(&mut one, &mut two);
    }
    running.signal(Signal::INT);
    let mut line = String::new();
    running.lines.read_line(&mut line).unwrap();
    assert!(line.contains("draining"), "{line}");
    one.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        .unwrap();
    let mut found = String::new();
    asked.read_to_string(&mut found).unwrap();
    assert!(found.ends_with("\r\n\r\nok"), "{found}");
    assert!(running.child.try_wait().unwrap().is_none());
    running.signal(Signal::TERM);
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
}

#[test]
fn metrics_are_those_of_both() {
    let running = Running::start();
    let listener = UnixListener::bind(running.folder.path().join("http")).unwrap();
    let answer = |head: &str, body: &str| {
        let mut asked = running.ask("/metrics");
        let mut stream = listener.accept().unwrap().0;
        assert!(stream.read(&mut [0; 1000]).unwrap() > 0);
        let head = format!(
            "{head}\r\nContent-Type: text/plain; x\r\nx-request-id: its\r\ncontent-length: {}",
            body.len()
        );
        stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).unwrap();
        if !head.contains(" 200 ") {
            // anything else is asked for again, and goes on as it is
            let mut stream = listener.accept().unwrap().0;
            assert!(stream.read(&mut [0; 1000]).unwrap() > 0);
            stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).unwrap();
        }
        let mut found = String::new();
        asked.read_to_string(&mut found).unwrap();
        found
    };
    let theirs = "# TYPE minisgl:generated_tokens_total counter\nminisgl:generated_tokens_total 5.0\nother 1.0\n";
    let found = answer("HTTP/1.1 200 OK", theirs);
    let (head, body) = found.split_once("\r\n\r\n").unwrap();
    assert!(
        head.contains("content-type: text/plain; x\r\n") && head.contains("x-request-id: its\r\n"),
        "{head}"
    );
    assert!(head.contains(&format!("content-length: {}\r\n", body.len())));
    assert!(body.starts_with(theirs) && body.contains("minisgl:gateway_requests_total{outcome=\"passed_on\"} 0.0\n"));
    assert!(body.contains("minisgl:ttft_seconds_count 0.0\n"));
    assert!(answer("HTTP/1.1 401 Unauthorized", "no").ends_with("\r\n\r\nno"));
}
