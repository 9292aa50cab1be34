//! The gateway's thread, and the commands of its owner.
//!
//! Invariants: clients are accepted from `start` on; all requests are proxied until `serve` and after `drain`.

use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use minisgl_text::Tokenizer;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{LocalSet, spawn_local};

use crate::answer::log::log_line;
use crate::config::GatewayConfig;
use crate::engine::EngineLink;
use crate::http::{Options, accept};
use crate::shared::{Loaded, Shared};
use crate::worker::Worker;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const WATCHDOG_INTERVAL: Duration = Duration::from_millis(500);
const IDLE_INTERVAL: Duration = Duration::from_millis(10);

enum Command {
    /// Serve requests; the sender is notified when the engine process is connected.
    Serve(Arc<Loaded>, Sender<()>),
    Drain,
    /// Fail all requests; the sender is notified when that is done.
    Fail(String, Sender<()>),
    Stop(Duration),
}

/// The gateway on its thread. Dropping it stops it at once.
pub struct Gateway {
    commands: UnboundedSender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    shared: Arc<Shared>,
}

impl Gateway {
    /// Starts the thread, which accepts clients on `listener`. `engine` and `fallback` are the paths of the Unix
    /// sockets of the engine process and of the Python server, which need not exist yet.
    pub fn start(listener: TcpListener, engine: PathBuf, fallback: PathBuf) -> io::Result<Gateway> {
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let shared = Arc::new(Shared::new()?);
        let (commands, receiver) = unbounded_channel();
        let seen = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("gateway".into()).spawn(move || {
            let tasks = LocalSet::new();
            let worker = Worker::new(seen);
            runtime.block_on(tasks.run_until(run(worker, listener, engine, fallback, receiver)));
        })?;
        Ok(Gateway {
            commands,
            thread: Mutex::new(Some(thread)),
            shared,
        })
    }

    /// Starts answering generation requests: Python is asked what to generate for each. Blocks up to 5 s; returns false
    /// if the engine process is not connected and ready by then.
    pub fn serve(&self, config: GatewayConfig, tokenizer: Arc<Tokenizer>) -> bool {
        let loaded = Arc::new(Loaded::new(config, tokenizer));
        self.shared.metrics.set_bounds(&loaded.config.metrics);
        self.shared.set_loaded(&loaded);
        let (sender, connected) = channel();
        self.send(Command::Serve(loaded, sender));
        connected.recv_timeout(CONNECT_TIMEOUT).is_ok()
    }

    /// Proxies all later requests to the Python server.
    pub fn drain(&self) {
        self.send(Command::Drain);
    }

    /// Ends all requests in progress with the error `reason`, and proxies later ones. Call it before stopping the
    /// engine.
    pub fn fail(&self, reason: &str) {
        let (sender, done) = channel();
        self.send(Command::Fail(reason.to_owned(), sender));
        let _ = done.recv_timeout(CONNECT_TIMEOUT); // an error means that the thread has ended
    }

    /// Closes all connections, busy ones after their response or after `grace`; waits for the thread's end. Idempotent.
    pub fn stop(&self, grace: Duration) {
        self.shared.questions.close();
        self.end_thread(grace);
    }

    fn end_thread(&self, grace: Duration) {
        self.send(Command::Stop(grace));
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join(); // whether it panicked or not, it has ended
        }
    }

    /// Returns the state shared with the gateway's thread: metrics, counters and questions.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    fn send(&self, command: Command) {
        let _ = self.commands.send(command); // an error means that the thread has ended
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.shared.questions.close(); // the thread that drops the gateway may be the one that answers questions
        self.end_thread(Duration::ZERO);
    }
}

async fn run(
    worker: Rc<Worker>,
    listener: TcpListener,
    engine: PathBuf,
    fallback: PathBuf,
    mut commands: UnboundedReceiver<Command>,
) {
    let options = Rc::new(Options::new(fallback, Box::new(|line| log_line("warning", line))));
    let accepting = spawn_local(accept_clients(listener, Rc::clone(&worker), Rc::clone(&options)));
    let mut following = None;
    let polling = spawn_local(poll_watchdog(Rc::clone(&worker)));
    let grace = loop {
        match commands.recv().await {
            Some(Command::Serve(loaded, connected)) => {
                configure(&options, &loaded.config);
                worker.serve(loaded, connected);
                // not before: a fatal error during the start goes to the Python server, which reports it
                following.get_or_insert_with(|| spawn_local(follow(Rc::clone(&worker), engine.clone())));
            }
            Some(Command::Drain) => worker.drain(),
            Some(Command::Fail(reason, done)) => {
                worker.fail(&reason);
                let _ = done.send(()); // an error means that the receiver is gone
            }
            Some(Command::Stop(grace)) => break grace,
            None => break Duration::ZERO,
        }
    };
    worker.drain();
    options.stop.close();
    let _ = tokio::time::timeout(grace, until_idle(&options)).await;
    options.stop.cut();
    for task in [accepting, polling].into_iter().chain(following) {
        task.abort();
    }
    let _ = tokio::time::timeout(Duration::from_millis(200), until_idle(&options)).await;
}

fn configure(options: &Options, config: &GatewayConfig) {
    let seconds = |value: f64| Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX / 4);
    options
        .slow_client_timeout
        .set(seconds(config.limits.slow_client_timeout));
    options
        .keep_alive_timeout
        .set(Duration::from_secs(config.limits.keep_alive_timeout));
    options.bodies.set_max(config.limits.max_encoding_bytes);
}

async fn until_idle(options: &Options) {
    while options.counts.open.get() > 0 {
        tokio::time::sleep(IDLE_INTERVAL).await;
    }
}

async fn accept_clients(listener: TcpListener, worker: Rc<Worker>, options: Rc<Options>) {
    if let Err(error) = accept(listener, worker, options).await {
        log_line("error", &format!("gateway: no further client can connect: {error}"));
    }
}

async fn follow(worker: Rc<Worker>, engine: PathBuf) {
    match EngineLink::connect(&engine, "gateway").await {
        Ok(link) => worker.follow(link).await,
        Err(error) => log_line(
            "error",
            &format!("gateway: cannot connect to the engine process: {error}"),
        ),
    }
}

async fn poll_watchdog(worker: Rc<Worker>) {
    loop {
        tokio::time::sleep(WATCHDOG_INTERVAL).await;
        worker.poll_watchdog();
    }
}
