//! Hardware limits of this machine: memory bandwidth, and multiply-adds per second by instruction set.
//!
//! Invariants: every figure is the best of several short runs on all threads, by CPU time, without help of caches.

use std::hint::black_box;
use std::sync::Barrier;

const RUNS: usize = 5;
const MEMORY: usize = 1 << 30; // bytes, larger than any cache
const LOOPS: usize = 20_000;

/// Returns the best rate over all threads and several runs, in units per second; one `call` does `work` units.
fn best_rate(threads: usize, seconds: f64, work: f64, call: impl Fn(usize) + Sync) -> f64 {
    (0..RUNS)
        .map(|_| rate(threads, seconds / RUNS as f64, work, &call))
        .fold(0.0, f64::max)
}

fn rate(threads: usize, seconds: f64, work: f64, call: &(impl Fn(usize) + Sync)) -> f64 {
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let barrier = &barrier;
        let each: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    call(thread); // warm-up
                    barrier.wait();
                    let (began, mut calls) = (thread_seconds(), 0_u32);
                    while thread_seconds() - began < seconds || calls == 0 {
                        call(thread);
                        calls += 1;
                    }
                    f64::from(calls) * work / (thread_seconds() - began)
                })
            })
            .collect();
        each.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
    })
}

/// Returns the CPU time of this thread in seconds. Other load on the machine does not count.
#[cfg(unix)]
fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writes.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + 1e-9 * time.tv_nsec as f64
}

#[cfg(not(unix))]
fn thread_seconds() -> f64 {
    static BEGAN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    BEGAN.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
}

/// Allocates `words` words of `value`, in huge pages where the system has them (like the engine's weights).
fn filled(words: usize, value: u64) -> Vec<u64> {
    let mut memory = Vec::with_capacity(words);
    #[cfg(target_os = "linux")]
    {
        let page = 2 << 20;
        let start = (memory.as_ptr() as usize).next_multiple_of(page);
        let end = (memory.as_ptr() as usize + 8 * words) / page * page;
        if start < end {
            // SAFETY: an advice about our own memory, which does not change its content.
            unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
        }
    }
    memory.resize(words, value);
    memory
}

/// Returns the wrapping sum of `words`, in a form that the compiler vectorizes.
#[inline(always)]
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 32];
    for chunk in words.chunks_exact(32) {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Returns the read bandwidth in GB/s. The threads share `bytes` of memory and read it repeatedly.
fn read(threads: usize, seconds: f64, bytes: usize) -> f64 {
    let memory: Vec<Vec<u64>> = (0..threads)
        .map(|i| filled(bytes / threads / 8, i as u64 + 1))
        .collect();
    best_rate(threads, seconds, (bytes / threads) as f64, |thread| {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: AVX2 was detected.
            black_box(unsafe { x86::sum_avx2(&memory[thread]) });
            return;
        }
        black_box(sum(&memory[thread]));
    }) / 1e9
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Register-only loops. `$n` accumulators hide the latency; operands from `black_box` cannot be folded.
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Returns `sum` of `words`, compiled for AVX2.
    ///
    /// # Safety
    /// The processor must have AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn sum_avx2(words: &[u64]) -> u64 {
        super::sum(words)
    }

    macro_rules! chains {
        ($name:ident, $features:literal, $n:literal, $zero:expr, $one:expr, |$acc:ident, $a:ident, $b:ident| $step:expr) => {
            /// Runs `$n` independent multiply-add chains `loops` times.
            ///
            /// # Safety
            /// The processor must have the named features.
            #[target_feature(enable = $features)]
            pub unsafe fn $name(loops: usize) {
                let mut accs = [$zero; $n];
                let ($a, $b) = (black_box($one), black_box($one));
                for _ in 0..loops {
                    for acc in &mut accs {
                        let $acc = *acc;
                        *acc = $step;
                    }
                }
                black_box(accs);
            }
        };
    }

    chains!(
        f32_avx2,
        "avx2,fma",
        10,
        _mm256_setzero_ps(),
        _mm256_set1_ps(0.5),
        |acc, a, b| _mm256_fmadd_ps(a, b, acc)
    );
    chains!(
        f32_avx512,
        "avx512f",
        16,
        _mm512_setzero_ps(),
        _mm512_set1_ps(0.5),
        |acc, a, b| _mm512_fmadd_ps(a, b, acc)
    );
    chains!(
        int8_avx2,
        "avx2",
        10,
        _mm256_setzero_si256(),
        _mm256_set1_epi8(1),
        |acc, a, b| _mm256_add_epi16(acc, _mm256_maddubs_epi16(_mm256_xor_si256(a, acc), b))
    );
    chains!(
        int8_avxvnni,
        "avx2,avxvnni",
        10,
        _mm256_setzero_si256(),
        _mm256_set1_epi8(1),
        |acc, a, b| _mm256_dpbusd_avx_epi32(acc, a, b)
    );
    chains!(
        int8_vnni,
        "avx512f,avx512vnni",
        16,
        _mm512_setzero_si512(),
        _mm512_set1_epi8(1),
        |acc, a, b| _mm512_dpbusd_epi32(acc, a, b)
    );

    /// Runs 16 independent chains of bf16 dot products `loops` times.
    ///
    /// # Safety
    /// The processor must have avx512_bf16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn bf16_avx512(loops: usize) {
        let mut accs = [_mm512_setzero_ps(); 16];
        let ones = black_box(_mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5), _mm512_set1_ps(0.5)));
        for _ in 0..loops {
            for acc in &mut accs {
                *acc = _mm512_dpbf16_ps(*acc, ones, ones);
            }
        }
        black_box(accs);
    }

    #[repr(C, align(64))]
    struct Tiles([u8; 64]);

    /// Requests permission to use AMX tiles. Returns true if processor and system grant it.
    #[cfg(target_os = "linux")]
    pub fn tiles_allowed() -> bool {
        let info = __cpuid_count(7, 0);
        const NEEDED: u32 = 1 << 24 | 1 << 25 | 1 << 22; // AMX tiles, int8 and bf16
        // SAFETY: a system call that changes what this process may use, and no memory.
        info.edx & NEEDED == NEEDED && unsafe { libc::syscall(libc::SYS_arch_prctl, 0x1023, 18) } == 0
    }

    #[cfg(not(target_os = "linux"))]
    pub fn tiles_allowed() -> bool {
        false
    }

    macro_rules! tiles {
        ($name:ident, $step:literal) => {
            /// Runs four AMX tile products (16 x 16 x 64 bytes) per loop.
            ///
            /// # Safety
            /// `tiles_allowed` must have returned true.
            pub unsafe fn $name(loops: usize) {
                let mut config = Tiles([0; 64]);
                config.0[0] = 1;
                for tile in 0..8 {
                    config.0[16 + 2 * tile] = 64;
                    config.0[48 + tile] = 16;
                }
                // SAFETY: the configuration is a valid one of palette 1; tiles are registers, given back at the end.
                unsafe {
                    asm!("ldtilecfg [{}]", in(reg) &config.0, options(nostack));
                    asm!(
                        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                        "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                        "2:",
                        concat!($step, " tmm0, tmm4, tmm6"), concat!($step, " tmm1, tmm4, tmm7"),
                        concat!($step, " tmm2, tmm5, tmm6"), concat!($step, " tmm3, tmm5, tmm7"),
                        "dec {n}", "jnz 2b",
                        "tilerelease",
                        n = inout(reg) loops => _, options(nostack)
                    );
                }
            }
        };
    }
    tiles!(int8_amx, "tdpbssd");
    tiles!(bf16_amx, "tdpbf16ps");
}

/// Measures multiply-adds. Returns (element type, instruction set, 1e9 multiply-adds per second).
#[cfg(target_arch = "x86_64")]
fn multiply_adds(threads: usize, seconds: f64) -> Vec<(&'static str, &'static str, f64)> {
    let mut rates = Vec::new();
    let mut measure = |what, isa, has: bool, per_loop: usize, call: unsafe fn(usize)| {
        if has {
            let work = (LOOPS * per_loop) as f64;
            // SAFETY: `has` is true only if the processor has the instructions of `call`.
            rates.push((
                what,
                isa,
                best_rate(threads, seconds, work, |_| unsafe { call(LOOPS) }) / 1e9,
            ));
        }
    };
    let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let (avx512, vnni) = (
        is_x86_feature_detected!("avx512f"),
        is_x86_feature_detected!("avx512vnni"),
    );
    let tiles = x86::tiles_allowed();
    measure("f32", "avx2", fma, 10 * 8, x86::f32_avx2);
    measure("f32", "avx512", avx512, 16 * 16, x86::f32_avx512);
    measure("int8", "avx2", fma, 10 * 32, x86::int8_avx2);
    let avxvnni = fma && is_x86_feature_detected!("avxvnni");
    measure("int8", "avxvnni", avxvnni, 10 * 32, x86::int8_avxvnni);
    measure("int8", "avx512 vnni", avx512 && vnni, 16 * 64, x86::int8_vnni);
    measure("int8", "amx", tiles, 4 * 16 * 16 * 64, x86::int8_amx);
    measure(
        "bf16",
        "avx512 bf16",
        avx512 && is_x86_feature_detected!("avx512bf16"),
        16 * 32,
        x86::bf16_avx512,
    );
    measure("bf16", "amx", tiles, 4 * 16 * 16 * 32, x86::bf16_amx);
    rates
}

#[cfg(not(target_arch = "x86_64"))]
fn multiply_adds(threads: usize, seconds: f64) -> Vec<(&'static str, &'static str, f64)> {
    let work = (LOOPS * 128) as f64;
    let call = |_| {
        let (mut accs, by) = ([0.0_f32; 128], black_box([0.5_f32; 128]));
        for _ in 0..LOOPS {
            for (acc, by) in accs.iter_mut().zip(&by) {
                *acc = by.mul_add(*by, *acc);
            }
        }
        black_box(accs);
    };
    vec![("f32", "as compiled", best_rate(threads, seconds, work, call) / 1e9)]
}

/// Measures this machine's limits with `threads` threads and `seconds` per figure. Returns (quantity, instruction set,
/// rate): `read` in GB/s from memory too large for caches; `f32`, `int8` and `bf16` in 1e9 multiply-adds per second.
#[must_use]
pub fn limits(threads: usize, seconds: f64) -> Vec<(&'static str, &'static str, f64)> {
    let mut rates = vec![("read", "", read(threads, seconds, MEMORY))];
    rates.extend(multiply_adds(threads, seconds));
    rates
}
