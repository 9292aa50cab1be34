//! Helpers that turn tensors into the parameters of operations: norms, matrices side by side, transposed matrices.

use minisgl_kernels::panels::{Matrix, PANEL, Part as Piece};
use minisgl_kernels::{Kind, TensorView};

use crate::error::Result;
use crate::model::config::ModelConfig;
use crate::model::held::Norm;
use crate::model::names::{At, Part};
use crate::model::operation::Projections;
use crate::model::tensors::{ModelTensor, Tensors};
use crate::weights::Packing;

/// Loads a norm over `size` elements.
pub(super) fn load_norm(tensors: &Tensors, config: &ModelConfig, part: Part, at: At, size: usize) -> Result<Norm> {
    let weight = tensors.part_vector(part, at, "weight", size)?;
    let bias = if config.norm_bias {
        Some(padded(tensors.part_vector(part, at, "bias", size)?))
    } else {
        None
    };
    Ok(Norm {
        weight: padded(with_offset(tensors, config, weight)),
        bias,
        eps: config.norm_eps,
        layer_norm: config.layer_norm,
    })
}

/// Adds the model's norm offset to the weights of a checkpoint. GGUF files include it already.
pub(super) fn with_offset(tensors: &Tensors, config: &ModelConfig, mut weights: Vec<f32>) -> Vec<f32> {
    if tensors.is_checkpoint() {
        weights.iter_mut().for_each(|weight| *weight += config.norm_offset);
    }
    weights
}

pub(super) fn pack(packing: &Packing<'_>, tensors: &[ModelTensor<'_>], interleave: bool) -> Result<Matrix> {
    let views: Vec<TensorView<'_>> = tensors.iter().map(ModelTensor::view).collect::<Result<_>>()?;
    let pieces: Vec<_> = views.into_iter().map(Piece::new).collect();
    packing.pack(&pieces, interleave, None)
}

/// Appends zeros up to whole panels.
pub(super) fn padded(mut numbers: Vec<f32>) -> Vec<f32> {
    numbers.resize(numbers.len().next_multiple_of(2 * PANEL), 0.0);
    numbers
}

/// Packs matrices side by side: into one if all have the same element type, else into one each.
pub(super) fn side_by_side(packing: &Packing<'_>, pieces: &[Piece<'_>]) -> Result<Projections> {
    let kind = |piece: &Piece<'_>| piece.tensor.kind().held();
    let alike = pieces.windows(2).all(|two| kind(&two[0]) == kind(&two[1]));
    let whole = pieces.iter().all(|piece| piece.tensor.rows().is_multiple_of(PANEL));
    if alike || !whole {
        let held = if alike { None } else { Some(Kind::F32) };
        return Ok(vec![(0, packing.pack(pieces, false, held)?)]);
    }
    let mut column = 0;
    let mut parts = Vec::new();
    for piece in pieces {
        parts.push((column, packing.pack(std::slice::from_ref(piece), false, None)?));
        column += piece.tensor.rows();
    }
    Ok(parts)
}

/// Packs the transposed matrix. Quantized blocks are decoded to f32.
pub(super) fn pack_transposed(packing: &Packing<'_>, view: TensorView<'_>) -> Result<Matrix> {
    if view.kind().block_len() == 1 {
        return pack(packing, &[ModelTensor::transposed(view, true)?], false);
    }
    let data: Vec<u8> = view.decode().into_iter().flat_map(f32::to_le_bytes).collect();
    let view = TensorView::new(view.name(), Kind::F32, view.shape(), &data)?;
    pack(packing, &[ModelTensor::transposed(view, true)?], false)
}
