//! Parameters that operations hold in addition to matrices: norms, and matrices with a bias.

use minisgl_kernels::panels::Matrix;
use minisgl_kernels::{Kernels, plain};

/// Weight matrix with an optional bias. Both are padded to whole panels.
pub struct Linear {
    /// Weight matrix, [outputs, inputs].
    pub weight: Matrix,
    /// Bias, [outputs]; `None` if the layer has none.
    pub bias: Option<Vec<f32>>,
}

/// RMS norm or layer norm.
pub struct Norm {
    /// Weight, padded to whole panels.
    pub weight: Vec<f32>,
    /// Bias, padded to whole panels.
    pub bias: Option<Vec<f32>>,
    /// Epsilon, added to the mean square under the root.
    pub eps: f32,
    /// True for a layer norm, which also subtracts the mean.
    pub layer_norm: bool,
}

impl Norm {
    /// Normalizes `size` elements of `x` with the weights from `first` on, and writes them to `out`, which may be `x`.
    ///
    /// # Safety
    /// `x` and `out` must fulfil the contract of `Kernels::rms_norm`.
    #[allow(unsafe_code)]
    pub unsafe fn apply(&self, kernels: &Kernels, x: *const f32, (first, size): (usize, usize), out: *mut f32) {
        let weight = &self.weight[first..first + size];
        // SAFETY: guaranteed by the caller.
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
