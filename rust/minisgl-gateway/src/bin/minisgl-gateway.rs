//! The gateway as a process of its own: in front of an engine process and a Python server that run already.
//!
//! Keeps true: the port is open at once; until the configuration is there, requests are passed on; a wrong option is
//! named with its value and costs exit code 2, what fails later 1.

use std::ffi::OsString;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use minisgl_gateway::config::GatewayConfig;
use minisgl_gateway::server::Gateway;
use tokio::signal::unix::{Signal, SignalKind, signal};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HELP: &str = "\
Usage: minisgl-gateway --engine ipc://PATH --fallback unix://PATH [options]

HTTP in front of an engine process. What it is not sure of goes on to the Python server.

  --engine ipc://PATH     socket of the engine process
  --fallback unix://PATH  socket of the Python server
  --host HOST             where to listen (127.0.0.1)
  --port PORT             where to listen (1919); 0: any free port
  --config FILE           what the Python server wrote for the gateway (gateway.json beside its socket);
                          everything is passed on until it is there
  --help, --version

SIGTERM or SIGINT: open answers end, for as long as the configuration says; a second one ends them at once.";
const BACKLOG: i32 = 2048;
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Until a configuration says it.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Arguments {
    engine: PathBuf,
    fallback: PathBuf,
    host: String,
    port: u16,
    config: PathBuf,
}

/// What to print instead of serving.
enum Asked {
    Serve(Arguments),
    Text(String),
}

fn main() -> ExitCode {
    let (code, text) = match arguments(lexopt::Parser::from_env()) {
        Ok(Asked::Text(text)) => {
            println!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(error) => (2, error),
        Ok(Asked::Serve(arguments)) => match serve(&arguments) {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => (1, error),
        },
    };
    eprintln!("minisgl-gateway: {text}");
    ExitCode::from(code)
}

fn arguments(mut parser: lexopt::Parser) -> Result<Asked, String> {
    use lexopt::Arg::{Long, Short, Value};
    let (mut engine, mut fallback, mut config) = (None, None, None);
    let (mut host, mut port) = ("127.0.0.1".to_owned(), 1919);
    while let Some(argument) = parser.next().map_err(|error| error.to_string())? {
        let name = match argument {
            Long("help") | Short('h') => return Ok(Asked::Text(HELP.into())),
            Long("version") => {
                return Ok(Asked::Text(
                    concat!("minisgl-gateway ", env!("CARGO_PKG_VERSION")).into(),
                ));
            }
            Long(name @ ("engine" | "fallback" | "host" | "port" | "config")) => name.to_owned(),
            Value(value) => return Err(format!("{}: not expected: see --help", value.display())),
            other => return Err(format!("{}: unknown: see --help", other.unexpected())),
        };
        let value = parser.value().map_err(|_| format!("--{name}: needs a value"))?;
        match name.as_str() {
            "engine" => engine = Some(path(&name, value, "ipc://")?),
            "fallback" => fallback = Some(path(&name, value, "unix://")?),
            "config" => config = Some(PathBuf::from(value)),
            "host" => host = text(&name, value)?,
            _ => {
                let given = text(&name, value)?;
                port = given
                    .parse()
                    .map_err(|_| format!("--port {given}: must be a number from 0 to 65535"))?;
            }
        }
    }
    let engine = engine.ok_or("--engine: missing: see --help")?;
    let fallback = fallback.ok_or("--fallback: missing: see --help")?;
    let config = config.unwrap_or_else(|| fallback.with_file_name("gateway.json"));
    Ok(Asked::Serve(Arguments {
        engine,
        fallback,
        host,
        port,
        config,
    }))
}

fn text(name: &str, value: OsString) -> Result<String, String> {
    value
        .into_string()
        .map_err(|value| format!("--{name} {}: not UTF-8", value.display()))
}

fn path(name: &str, value: OsString, scheme: &str) -> Result<PathBuf, String> {
    let value = text(name, value)?;
    match value.strip_prefix(scheme) {
        Some(path) if !path.is_empty() => Ok(path.into()),
        _ => Err(format!("--{name} {value}: must be {scheme}PATH")),
    }
}

fn serve(arguments: &Arguments) -> Result<(), String> {
    let Arguments { host, port, .. } = arguments;
    let listener = listen(host, *port).map_err(|error| format!("--host {host} --port {port}: {error}"))?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let gateway = Gateway::start_alone(listener, arguments.engine.clone(), arguments.fallback.clone());
    let gateway = Arc::new(gateway.map_err(|error| error.to_string())?);
    eprintln!("minisgl-gateway: http://{address}");
    let found = runtime.block_on(run(&gateway, &arguments.config));
    runtime.shutdown_background(); // whatever is still being loaded is not waited for
    found
}

fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let listener = TcpListener::bind((host.trim_start_matches('[').trim_end_matches(']'), port))?;
    rustix::net::listen(&listener, BACKLOG)?; // more than the standard library's
    Ok(listener)
}

async fn run(gateway: &Arc<Gateway>, file: &Path) -> Result<(), String> {
    let mut ends = Ends::new().map_err(|error| error.to_string())?;
    let mut drain_timeout = DRAIN_TIMEOUT;
    tokio::select! {
        () = ends.next() => {}
        found = configure(gateway, file, &mut drain_timeout) => {
            found?;
            ends.next().await;
        }
    }
    eprintln!(
        "minisgl-gateway: draining: open answers end, at the latest after {} s",
        drain_timeout.as_secs_f64()
    );
    gateway.drain();
    let stopping = Arc::clone(gateway);
    let stopped = tokio::task::spawn_blocking(move || stopping.stop(drain_timeout));
    tokio::select! {
        _ = stopped => {}
        () = ends.next() => {}
    }
    Ok(())
}

/// Waits for the file; from then on the gateway answers by itself.
async fn configure(gateway: &Arc<Gateway>, file: &Path, drain_timeout: &mut Duration) -> Result<(), String> {
    let named = |error: &dyn std::fmt::Display| format!("--config {}: {error}", file.display());
    let bytes = loop {
        match std::fs::read(file) {
            Ok(bytes) => break bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => tokio::time::sleep(LOOK_EVERY).await,
            Err(error) => return Err(named(&error)),
        }
    };
    let config: GatewayConfig = serde_json::from_slice(&bytes).map_err(|error| named(&error))?;
    *drain_timeout = Duration::try_from_secs_f64(config.limits.drain_timeout).map_err(|error| named(&error))?;
    let loading = Arc::clone(gateway);
    let lines = tokio::task::spawn_blocking(move || loading.serve(config)).await;
    for line in lines.map_err(|error| named(&error))?.map_err(|error| named(&error))? {
        eprintln!("minisgl-gateway: {line}");
    }
    eprintln!("minisgl-gateway: ready");
    Ok(())
}

/// Signals to end.
struct Ends(Signal, Signal);

impl Ends {
    fn new() -> io::Result<Self> {
        Ok(Self(signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}
