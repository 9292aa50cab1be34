//! How fast the matrix products are on one core: `kernels [isa=..] [form=..] [mode=exact|bf16|int8] [rows=..] [shape=..]`
//! prints a line a case: multiply-adds and bytes of weights a second, and the share of what `limits`, built beside it,
//! measures this core to do at most. Every setting is a list (`rows=1,8`); without one, all there are.
//!
//! Invariants: the best of many short runs by CPU time, in turns over copies of a matrix that no core's cache holds.

use std::process::Command;

use minisgl_cpu::files::{Kind, TensorView};
use minisgl_cpu::kernels::{Acts, ActsPtr, Isa, Kernels, Mode};
use minisgl_cpu::weights::{Form, Matrix, PANEL, Part};

/// Name, inputs, outputs: of SmolLM2-135M, then of Qwen3-0.6B.
const SHAPES: [(&str, usize, usize); 9] = [
    ("smol_qkv", 576, 960),
    ("smol_o", 576, 576),
    ("smol_gate_up", 576, 3072),
    ("smol_down", 1536, 576),
    ("smol_head", 576, 49152),
    ("qwen_qkv", 1024, 4096),
    ("qwen_gate_up", 1024, 6144),
    ("qwen_down", 3072, 1024),
    ("qwen_head", 1024, 151_936),
];
const ROWS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 512];
/// More than a core's own caches; a model may stay in a shared one.
const WEIGHTS: usize = 48 << 20;
const SECONDS: f64 = 0.15;

/// The values of a setting, or nothing if it is not given.
fn setting(name: &str) -> Option<Vec<String>> {
    let prefix = format!("{name}=");
    let given = std::env::args().find_map(|arg| arg.strip_prefix(&prefix).map(str::to_owned))?;
    Some(given.split(',').map(str::to_owned).collect())
}

fn wanted(name: &str, value: &str) -> bool {
    setting(name).is_none_or(|values| values.iter().any(|one| one.eq_ignore_ascii_case(value)))
}

/// What one core does at most, by the names that `limits` gives them.
fn limits() -> Option<serde_json::Value> {
    let path = std::env::current_exe().ok()?.with_file_name("limits");
    let output = Command::new(path).args(["1", "0.4"]).output().ok()?;
    serde_json::from_slice(&output.stdout).ok()
}

/// G multiply-adds a second at most.
fn peak(limits: &serde_json::Value, isa: Isa, int8: bool) -> f64 {
    let name = match (isa, int8) {
        (Isa::Avx512, false) | (Isa::Amx, false) => "f32 avx512",
        (Isa::Avx512, true) => "int8 avx512 vnni",
        (Isa::Amx, true) => "int8 amx",
        (_, false) => "f32 avx2",
        (_, true) => "int8 avx2",
    };
    limits["all"][name].as_f64().unwrap_or(f64::NAN)
}

#[cfg(unix)]
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

#[cfg(not(unix))]
fn cpu_seconds() -> f64 {
    static BEGAN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    let began = BEGAN.get_or_init(std::time::Instant::now);
    began.elapsed().as_secs_f64()
}

/// Weights of a form: scales are small, everything else is anything (but never so small that the CPU takes its time).
fn matrices(form: Form, k: usize, n: usize) -> Vec<Matrix> {
    let kind = match form {
        Form::Q4 => Kind::Q4_1,
        Form::Q8 => Kind::Q8_0,
        Form::F16 => Kind::F16,
        Form::Bf16 => Kind::BF16,
        Form::F32 => Kind::F32,
    };
    let bytes = kind.bytes_of(n * k).unwrap_or(0);
    // As a half, a single's upper half or a single, its last two bytes are about 1.
    let data: Vec<u8> = (0..bytes)
        .map(|i| match (kind, i % kind.block_bytes()) {
            (Kind::F16 | Kind::BF16, 1) | (Kind::F32, 3) => 0x3c + (i % 3) as u8,
            (_, 1 | 3) => 0x2c,
            _ => (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3],
        })
        .collect();
    let shape = [n, k];
    let copies = WEIGHTS.div_ceil(bytes).max(1);
    let tensor = TensorView::new("w", kind, &shape, &data).expect("the shape fits");
    let pack = || Matrix::pack(&[Part::new(tensor)], false, None).expect("one part");
    (0..copies).map(|_| pack()).collect()
}

/// Seconds of a product with one matrix, at best. As the engine does, 16 panels are claimed at a time.
fn seconds(kernels: Kernels, matrices: &[Matrix], acts: ActsPtr, rows: usize) -> f64 {
    const CLAIM: usize = 16;
    let stride = matrices[0].panels() * PANEL;
    let mut out = vec![0.0f32; rows * stride];
    let (mut best, began, mut at) = (f64::MAX, cpu_seconds(), 0);
    while cpu_seconds() - began < SECONDS || at < 3 * matrices.len() {
        let (start, mut calls) = (cpu_seconds(), 0);
        while calls == 0 || (calls < matrices.len() && cpu_seconds() - start < 0.003) {
            let w = &matrices[at % matrices.len()];
            for from in (0..w.panels()).step_by(CLAIM) {
                let panels = from..(from + CLAIM).min(w.panels());
                // SAFETY: all rows are prepared, `out` has room for all panels.
                unsafe {
                    let to = out.as_mut_ptr().add(from * PANEL);
                    kernels.matmul(w, panels, acts, 0..rows, to, stride, false);
                }
            }
            (at, calls) = (at + 1, calls + 1);
        }
        best = best.min((cpu_seconds() - start) / calls as f64);
        if cpu_seconds() - began > 8.0 * SECONDS {
            break;
        }
    }
    best
}

fn main() {
    let limits = limits().unwrap_or_default();
    let read = limits["read_one_thread_gb_s"].as_f64().unwrap_or(f64::NAN);
    println!("one core reads {read:.1} GB/s; multiply-adds {}", limits["all"]);
    println!("isa form mode shape rows | GMAC/s, of peak | GB/s of weights, of read");
    for (name, k, n) in SHAPES.into_iter().filter(|shape| wanted("shape", shape.0)) {
        for form in Form::ALL
            .into_iter()
            .filter(|form| wanted("form", &format!("{form:?}")))
        {
            let matrices = matrices(form, k, n);
            for mode in [Mode::Exact, Mode::Bf16, Mode::Int8] {
                if wanted("mode", &format!("{mode:?}")) && mode.serves(form) {
                    for isa in Isa::here().into_iter().filter(|isa| wanted("isa", isa.name())) {
                        measure(&matrices, name, mode, isa, (&limits, read));
                    }
                }
            }
        }
    }
}

fn measure(matrices: &[Matrix], name: &str, mode: Mode, isa: Isa, (limits, read): (&serde_json::Value, f64)) {
    let (w, kernels) = (&matrices[0], Kernels::new(isa));
    for rows in ROWS.into_iter().filter(|rows| wanted("rows", &rows.to_string())) {
        let acts = Acts::new(rows, w.k(), mode);
        let writer = acts.writer(rows, w.k());
        let x: Vec<f32> = (0..w.k()).map(|i| (i as f32 * 0.7).sin()).collect();
        // SAFETY: `x` has k numbers; no other thread is there.
        (0..rows).for_each(|row| unsafe { kernels.prepare(x.as_ptr(), writer, row) });
        let seconds = seconds(kernels, matrices, writer, rows);
        let work = (w.n() * w.k() * rows) as f64 / seconds / 1e9;
        let bytes = w.bytes() as f64 / seconds / 1e9;
        let peak = peak(limits, isa, mode.int8_with(w.form()));
        println!(
            "{:7} {:4} {:5} {name:12} {rows:3} | {work:7.1} {:4.0} % | {bytes:5.1} {:4.0} %",
            isa.name(),
            format!("{:?}", w.form()),
            format!("{mode:?}"),
            100.0 * work / peak,
            100.0 * bytes / read,
        );
    }
}
