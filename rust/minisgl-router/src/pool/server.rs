//! Thread of a pool, and the commands of its owner.
//!
//! Invariants: front ends can connect when `start` returns; thread and socket are gone when `stop` returns.

use std::fs::{Permissions, remove_file, set_permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use minisgl_gateway::engine::{WatchTimes, Watchdog};
use minisgl_gateway::message::{FromEngine, encode_from_engine};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
use serde::Deserialize;
use tokio::net::UnixListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{interval, sleep, timeout};

use super::follow::follow;
use super::io::{Io, refuse, serve};
use super::requests::FrontEndRules;
use super::switchboard::{Readings, Switchboard};
use crate::policy::RouterConfig;

/// Time for the last messages to front ends before the pool's thread ends.
const LINGER: Duration = Duration::from_secs(1);

enum Command {
    Restarting(usize, bool),
    Stop,
}

/// A pool of engines on a thread of its own. Dropping it stops it.
pub struct EnginePool {
    commands: UnboundedSender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    readings: Arc<Mutex<Readings>>,
    num_engines: usize,
}

impl EnginePool {
    /// Binds the socket for front ends and starts the pool's thread, which connects to the engines.
    ///
    /// # Errors
    /// The configuration is invalid, or the socket cannot be bound.
    pub fn start(mut config: PoolConfig) -> io::Result<Self> {
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        if config.engines.is_empty() {
            return Err(invalid("engines: must name at least one socket".to_owned()));
        }
        let num_engines = config.engines.len();
        config.router.num_engines = num_engines;
        let readings = Arc::new(Mutex::new(Readings::default()));
        // only checks the configuration: the switchboard in use is made in its thread
        let rules = Rc::new(config.front_ends.clone());
        let board = Switchboard::new(config.router.clone(), rules).map_err(invalid)?;
        board.write_metrics(&mut readings.lock().unwrap_or_else(PoisonError::into_inner));
        let listener = listen_at(&config.listen, config.front_ends.max_front_ends)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let (commands, receiver) = unbounded_channel();
        let seen = Arc::clone(&readings);
        let thread = std::thread::Builder::new().name("engine-pool".into()).spawn(move || {
            let rules = Rc::new(config.front_ends.clone());
            let Ok(board) = Switchboard::new(config.router.clone(), Rc::clone(&rules)) else {
                return;
            };
            let tasks = LocalSet::new();
            let io = Rc::new(Io::new(board, num_engines, seen, rules));
            runtime.block_on(tasks.run_until(run(io, &config, listener, receiver)));
            let _ = remove_file(&config.listen); // the socket may be removed already
        })?;
        Ok(Self {
            commands,
            thread: Mutex::new(Some(thread)),
            readings,
            num_engines,
        })
    }

    /// Sets whether the owner of an engine's process restarts it. If so, requests wait for it.
    ///
    /// # Errors
    /// There is no such engine.
    pub fn restarting(&self, engine: usize, yes: bool) -> Result<(), String> {
        let num_engines = self.num_engines;
        if engine >= num_engines {
            return Err(format!("engine {engine}: must be below {num_engines}"));
        }
        let _ = self.commands.send(Command::Restarting(engine, yes)); // an error means that the thread has ended
        Ok(())
    }

    /// Returns the counters of the pool. Does not wait for its thread.
    pub fn readings(&self) -> Readings {
        self.readings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Closes all connections and waits for the thread to end. Idempotent.
    pub fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join(); // whether it panicked or not, it has ended
        }
    }
}

impl Drop for EnginePool {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Binds a listening Unix socket with mode 0600 set before a client can connect.
fn listen_at(path: &Path, max_front_ends: usize) -> io::Result<std::os::unix::net::UnixListener> {
    let made = socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    rustix::io::fcntl_setfd(&made, rustix::io::FdFlags::CLOEXEC)?;
    bind(&made, &SocketAddrUnix::new(path)?)?;
    set_permissions(path, Permissions::from_mode(0o600))?;
    listen(&made, i32::try_from(max_front_ends).unwrap_or(i32::MAX))?;
    let listener = std::os::unix::net::UnixListener::from(made);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn run(
    io: Rc<Io>,
    config: &PoolConfig,
    listener: std::os::unix::net::UnixListener,
    mut commands: UnboundedReceiver<Command>,
) {
    let Ok(listener) = UnixListener::from_std(listener) else {
        return;
    };
    let mut tasks = vec![
        spawn_local(accept(Rc::clone(&io), listener)),
        spawn_local(beat(Rc::clone(&io), config.watch.interval_s)),
    ];
    for (engine, path) in config.engines.iter().enumerate() {
        let (io, path) = (Rc::clone(&io), path.clone());
        let (step_timeout, times) = (config.step_timeout, config.watch);
        tasks.push(spawn_local(async move {
            follow(io, engine, &path, || Watchdog::new(step_timeout, times)).await;
        }));
    }
    loop {
        tokio::select! {
            command = commands.recv() => match command {
                Some(Command::Restarting(engine, yes)) => io.act(|board| board.restarting(engine, yes)),
                Some(Command::Stop) | None => break,
            },
            () = io.ended.notified() => break,
        }
    }
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    io.close_all();
    let _ = timeout(LINGER, async {
        while io.num_peers() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

async fn accept(io: Rc<Io>, listener: UnixListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) if io.num_peers() < io.rules.max_front_ends => serve(&io, stream),
            Ok((stream, _)) => {
                let text = io.rules.too_many.clone();
                refuse(&stream, &encode_from_engine(&[FromEngine::EngineFailed(text)])).await;
            }
            Err(_) => sleep(Duration::from_millis(10)).await, // it has disconnected, or no descriptor is free
        }
    }
}

async fn beat(io: Rc<Io>, interval_s: f64) {
    let mut ticks = interval(Duration::try_from_secs_f64(interval_s).unwrap_or(LINGER));
    loop {
        ticks.tick().await;
        io.act(Switchboard::beat);
    }
}

/// Configuration of an [`EnginePool`]; `router.num_engines` is set from the length of `engines`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// Path of the Unix socket for front ends.
    pub listen: PathBuf,
    /// Paths of the engine processes' sockets.
    pub engines: Vec<PathBuf>,
    /// Configuration of the router, which chooses the engine of a request.
    #[serde(default)]
    pub router: RouterConfig,
    /// Seconds that one forward pass may take.
    pub step_timeout: f64,
    /// Heartbeat timing: when an engine counts as failed.
    pub watch: WatchTimes,
    /// Limits and error texts for front ends.
    pub front_ends: FrontEndRules,
}
