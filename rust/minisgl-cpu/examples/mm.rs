//! scratch
use minisgl_cpu::files::{Kind, TensorView};
use minisgl_cpu::kernels::*;
use minisgl_cpu::weights::*;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let forms: Vec<&str> = args
        .get(1)
        .map(|s| s.split(',').collect())
        .unwrap_or(vec!["q4", "q8"]);
    let rowss: Vec<usize> = args
        .get(2)
        .map(|s| s.split(',').map(|x| x.parse().unwrap()).collect())
        .unwrap_or(vec![1, 2, 4, 8, 16, 32, 64, 512]);
    let (n, k): (usize, usize) = args
        .get(3)
        .map(|s| {
            let v: Vec<usize> = s.split('x').map(|x| x.parse().unwrap()).collect();
            (v[0], v[1])
        })
        .unwrap_or((1536, 576));
    let isas: Vec<Isa> = Isa::here()
        .into_iter()
        .filter(|i| *i != Isa::Scalar && *i != Isa::Avx2)
        .collect();
    for f in forms {
        let (kind, form) = match f {
            "q4" => (Kind::Q4_1, Form::Q4),
            "q8" => (Kind::Q8_0, Form::Q8),
            _ => (Kind::BF16, Form::Bf16),
        };
        let per = match form {
            Form::Q4 => 20 * k / 32,
            Form::Q8 => 34 * k / 32,
            _ => 2 * k,
        };
        let mut seed = 1u32;
        let mut data: Vec<u8> = (0..n * per)
            .map(|_| {
                seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
                (seed >> 24) as u8
            })
            .collect();
        if form == Form::Bf16 {
            for c in data.chunks_exact_mut(2) {
                c[1] = 0x3c + (c[1] & 3) | (c[1] & 0x80);
            }
        } else {
            let b = if form == Form::Q4 { 20 } else { 34 };
            for c in data.chunks_exact_mut(b) {
                c[1] = 0x20;
                if b == 20 {
                    c[3] = 0x20;
                }
            }
        }
        let shape = [n, k];
        let w = Matrix::pack(
            &[Part::new(
                TensorView::new("w", kind, &shape, &data).unwrap(),
            )],
            false,
            None,
        )
        .unwrap();
        let modes: Vec<Mode> = if form == Form::Bf16 {
            vec![Mode::Exact]
        } else {
            vec![Mode::Exact, Mode::Int8]
        };
        for mode in modes {
            for &rows in &rowss {
                let acts = Acts::new(rows, k, mode);
                let wr = acts.writer(rows, k);
                let x: Vec<f32> = (0..rows * k)
                    .map(|i| ((i * 7919 % 1000) as f32 - 500.) / 500.)
                    .collect();
                let mut out = vec![0f32; rows * n];
                let mut best = vec![f64::MAX; isas.len()];
                let reps = (3e9 / (rows as f64 * n as f64 * k as f64)).clamp(3.0, 300.0) as usize;
                for _ in 0..reps {
                    for (i, &isa) in isas.iter().enumerate() {
                        let ks = Kernels::new(isa);
                        unsafe {
                            for r in 0..rows {
                                ks.prepare(x[r * k..].as_ptr(), wr, r);
                            }
                            let t = std::time::Instant::now();
                            let mut p = 0;
                            while p < w.panels() {
                                let e = (p + 8).min(w.panels());
                                ks.matmul(
                                    &w,
                                    p..e,
                                    wr,
                                    0..rows,
                                    out.as_mut_ptr().add(p * 16),
                                    n,
                                    false,
                                );
                                p = e;
                            }
                            best[i] = best[i].min(t.elapsed().as_secs_f64());
                        }
                    }
                }
                let g: Vec<String> = best
                    .iter()
                    .zip(&isas)
                    .map(|(b, i)| {
                        format!(
                            "{i:?} {:.0} us {:.0} GMAC/s {:.1} GB/s",
                            b * 1e6,
                            (rows * n * k) as f64 / b / 1e9,
                            w.bytes() as f64 / b / 1e9
                        )
                    })
                    .collect();
                println!("{f} {mode:?} {n}x{k} rows {rows}: {}", g.join(" | "));
            }
        }
    }
}
