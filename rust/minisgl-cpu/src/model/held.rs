//! What operations hold beside matrices: norms, and matrices with a bias.

use minisgl_kernels::panels::Matrix;
use minisgl_kernels::{Kernels, plain};

/// A matrix, perhaps with a bias. Both are padded to whole panels.
pub struct Linear {
    /// [outputs, inputs]
    pub weight: Matrix,
    /// [outputs]
    pub bias: Option<Vec<f32>>,
}

/// A norm over some numbers.
pub struct Norm {
    /// As numbers are multiplied with, padded.
    pub weight: Vec<f32>,
    /// Added, padded.
    pub bias: Option<Vec<f32>>,
    /// Added to the mean square under the root.
    pub eps: f32,
    /// It takes the mean off, too.
    pub layer_norm: bool,
}

impl Norm {
    /// Writes `size` numbers of `x`, normalised with the weights from `first` on, to `out`, which may be `x`.
    ///
    /// # Safety
    /// As of `Kernels::rms_norm`.
    #[allow(unsafe_code)]
    pub unsafe fn apply(&self, kernels: &Kernels, x: *const f32, (first, size): (usize, usize), out: *mut f32) {
        let weight = &self.weight[first..first + size];
        // SAFETY: the caller's.
        unsafe {
            if self.layer_norm {
                let bias = self.bias.as_ref().map(|bias| &bias[first..first + size]);
                std::ptr::copy(x, out, size);
                let numbers = std::slice::from_raw_parts_mut(out, size);
                plain::layer_norm(kernels.isa(), numbers, weight, bias, self.eps);
            } else {
                kernels.rms_norm(x, weight.as_ptr(), size, self.eps, out);
            }
        }
    }
}
