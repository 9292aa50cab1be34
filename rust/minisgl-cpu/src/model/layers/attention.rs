//! Loader of attention: the operations from a layer's hidden states to the output projection.
//!
//! Invariants: keys and values of a step are in their pages before any of its rows reads them.

use std::sync::Arc;

use minisgl_kernels::TensorView;
use minisgl_kernels::panels::{Matrix, PANEL, Part as Piece};

use crate::error::{Error, Result};
use crate::model::adapter::Site;
use crate::model::config::{self, ByDistance, HeadNorms, LatentConfig, MAX_LAYERS, ModelConfig, Ranges, Slopes};
use crate::model::held::Norm;
use crate::model::layers::loader::{Loader, MAX_SIZE, unsupported, within};
use crate::model::names::Part;
use crate::model::operation::{Attend, Heads, Operation, PerHead, Project, Projections, Rotation, Rows, TokenStep};
use crate::model::pieces::{pack_transposed, padded, side_by_side, with_offset};
use crate::model::tensors::ModelTensor;

const MAX_HEAD_DIM: usize = minisgl_kernels::kv::MAX_HEAD_DIM;

/// Rejects attention settings that are invalid or not supported.
pub(super) fn check(config: &ModelConfig) -> Result<()> {
    for (layer, heads) in config.heads.iter().enumerate() {
        within("num_key_value_heads", heads.kv_heads, MAX_LAYERS)?;
        within("head_dim", heads.head_dim, MAX_HEAD_DIM)?;
        check_heads(config, layer, heads)?;
    }
    if config.windows.contains(&Some(0)) {
        return Err(unsupported("sliding_window", 0, "must be at least 1"));
    }
    if config.both_ways && (config.chunked || config.state.is_some() || config.latent.is_some()) {
        return Err(Error::unsupported(
            "config.json: bidirectional attention is not supported with chunks, recurrent layers or latents",
        ));
    }
    if let Some(distances) = &config.distances {
        check_distances(config, distances)?;
    }
    if config.query_growth.is_some_and(|growth| growth.every == 0) {
        return Err(unsupported("original_max_position_embeddings", 0, "must be at least 1"));
    }
    if config.attention_gates && (config.latent.is_some() || config.qkv_bias) {
        let why = "not supported with attention output gates";
        return Err(unsupported("attention_bias", 1, why));
    }
    if config.latent.is_some() && config.qkv_bias {
        return Err(unsupported("attention_bias", 1, "not supported with latent attention"));
    }
    config
        .latent
        .as_ref()
        .map_or(Ok(()), |latent| check_latent(config, latent))
}

fn check_heads(config: &ModelConfig, layer: usize, heads: &config::Heads) -> Result<()> {
    if !config.num_heads.is_multiple_of(heads.kv_heads) {
        let why = format!("does not divide num_attention_heads {}", config.num_heads);
        return Err(unsupported("num_key_value_heads", heads.kv_heads, &why));
    }
    if let Some(table) = config.rotary[layer] {
        let rotated = 2 * config.inverse_frequencies[table].len();
        if rotated == 0 || rotated > heads.head_dim {
            let why = format!("the RoPE columns must be 1 to the head size {}", heads.head_dim);
            return Err(unsupported("head_dim", rotated, &why));
        }
    }
    let alike = |other: &config::Heads| (other.kv_heads, other.head_dim) == (heads.kv_heads, heads.head_dim);
    let owner = config.heads.get(heads.kv_of).filter(|owner| owner.kv_of == heads.kv_of);
    let owner = owner.filter(|_| config.attends[heads.kv_of] || !config.attends[layer]);
    if heads.kv_of > layer || !owner.is_some_and(alike) {
        let why = "not an earlier layer with equal heads";
        return Err(unsupported("num_kv_shared_layers", heads.kv_of, why));
    }
    Ok(())
}

fn check_distances(config: &ModelConfig, distances: &ByDistance) -> Result<()> {
    let (name, value, fits, positions) = match distances {
        ByDistance::Ranges(Ranges { count, most, positions }) => {
            let fits = *count >= 4 && *most > count / 4;
            ("relative_attention_num_buckets", *count, fits, *positions)
        }
        ByDistance::Slopes(Slopes { by_head, positions }) => {
            let fits = by_head.len() == config.num_heads && by_head.iter().all(|slope| slope.is_finite());
            ("num_attention_heads", by_head.len(), fits, *positions)
        }
    };
    if fits && (1..=1 << 16).contains(&positions) {
        return Ok(());
    }
    Err(unsupported(name, value, "out of range"))
}

fn check_latent(config: &ModelConfig, latent: &LatentConfig) -> Result<()> {
    for (name, size) in [("kv_lora_rank", latent.rank), ("v_head_dim", latent.value_dim)] {
        if size == 0 || size > MAX_HEAD_DIM || !size.is_multiple_of(PANEL) {
            let why = format!("must be a multiple of {PANEL} up to {MAX_HEAD_DIM}");
            return Err(unsupported(name, size, &why));
        }
    }
    if latent.plain_dim == 0 || latent.plain_dim > MAX_HEAD_DIM || latent.query_rank > MAX_SIZE {
        return Err(unsupported("qk_nope_head_dim", latent.plain_dim, "out of range"));
    }
    let (heads, rotated) = (config.heads[0], config.rotary_dim(0));
    if heads.kv_heads != 1 || heads.head_dim != latent.rank + rotated {
        return Err(unsupported("qk_rope_head_dim", rotated, "does not fit the rest"));
    }
    Ok(())
}

impl Loader<'_> {
    /// Returns the operations of attention, and its output projection, whose target the caller sets.
    pub(super) fn attention(&self, norm: Option<Arc<Norm>>) -> Result<(Vec<Operation>, Project)> {
        let (config, layer) = (self.config, self.layer);
        let mut operations = vec![Operation::Project(Project {
            norm,
            bias: self.qkv_bias()?,
            adapted: Some((layer, Site::Qkv)),
            ..Project::new(Rows::Hidden, self.projections()?, Rows::Projected)
        })];
        if let Some(latent) = &config.latent {
            operations.extend(self.over_latents(latent)?);
        } else {
            let gates = config.gates(layer);
            operations.push(Operation::EachToken(self.head_steps()?));
            operations.push(self.attend((Rows::Projected, gates), Rows::Attended)?);
            if gates > 0 {
                operations.push(Operation::Gate(gates));
            }
        }
        let shape = [config.hidden_size, config.attended(layer)];
        let out = Project {
            adapted: Some((layer, Site::Out)),
            ..self.product(Part::Out, shape, config.out_bias, Rows::Attended)?
        };
        Ok((operations, out))
    }

    fn attend(&self, queries: (Rows, usize), to: Rows) -> Result<Operation> {
        let (config, layer) = (self.config, self.layer);
        let heads = config.heads[layer];
        Ok(Operation::Attend(Attend {
            layer,
            kv_of: (heads.kv_of, config.kv_layer(layer)),
            queries,
            to,
            heads: [config.num_heads, heads.kv_heads, heads.head_dim],
            window: config.windows[layer],
            sinks: self.sinks()?,
        }))
    }

    fn rotation(&self) -> Option<Rotation> {
        self.config.rotary[self.layer].map(|table| Rotation {
            at: self.config.angles_at(table),
            half: self.config.inverse_frequencies[table].len(),
        })
    }

    /// Returns the operations on queries, keys and values before attention: norms, RoPE, scales, KV store.
    fn head_steps(&self) -> Result<Vec<TokenStep>> {
        let (config, of_layer) = (self.config, self.config.heads[self.layer]);
        let (size, [width, key_width, _]) = (of_layer.head_dim, config.widths(self.layer));
        let heads = |at: usize, width: usize| Heads {
            at,
            count: width / size,
            size,
        };
        let queries = heads(config.gates(self.layer), width);
        let keys = heads(queries.at + width, key_width);
        let values = heads(keys.at + key_width, key_width);
        let has_keys = key_width > 0;

        let norm = |norm: Option<Norm>, heads: Heads| {
            let norm = norm.filter(|_| heads.count > 0);
            norm.map(|norm| match config.qk_norm {
                HeadNorms::Whole => {
                    let size = heads.count * size;
                    TokenStep::Norm(
                        norm,
                        Heads {
                            count: 1,
                            size,
                            ..heads
                        },
                        0,
                    )
                }
                HeadNorms::Heads => TokenStep::Norm(norm, heads, size),
                _ => TokenStep::Norm(norm, heads, 0),
            })
        };
        let [of_queries, of_keys, of_values] = self.head_norms()?;
        let norms = [norm(of_queries, queries), norm(of_keys, keys)].into_iter().flatten();
        let rotation = self.rotation();
        let both = heads(queries.at, width + key_width);
        let rotated = rotation.map(|by| TokenStep::Rotate(both, by));
        let mut steps = Vec::new();
        if of_layer.values_are_keys && has_keys {
            steps.push(TokenStep::Copy(keys, values.at));
        }
        if matches!(config.qk_norm, HeadNorms::Rotated | HeadNorms::Plain) {
            steps.extend(rotated.into_iter().chain(norms));
        } else {
            steps.extend(norms.chain(rotated));
        }
        let of_values = of_values.filter(|_| has_keys);
        steps.extend(of_values.map(|norm| TokenStep::Norm(norm, values, 0)));
        if config.value_scale != 1.0 && has_keys {
            steps.push(TokenStep::Scale(values, config.value_scale));
        }
        let growth = config.query_growth.filter(|one| !(one.unrotated && rotation.is_some()));
        steps.extend(growth.map(|by| TokenStep::Grow(queries, by)));
        if has_keys {
            steps.push(TokenStep::Store {
                layer: config.kv_layer(self.layer),
                keys: keys.at,
                values: values.at,
            });
        }
        Ok(steps)
    }

    /// Returns the operations of latent attention (MLA). Keys K c are never computed: q (K c) = (K' q) c, so queries
    /// are mapped to the space of latents c, and values are computed from the weighted sum of latents.
    fn over_latents(&self, latent: &LatentConfig) -> Result<Vec<Operation>> {
        let (config, layer, rank) = (self.config, self.layer, latent.rank);
        let norm = |part, size| -> Result<Norm> {
            Ok(Norm {
                weight: padded(self.vector(part, "weight", size)?),
                bias: None,
                eps: latent.norm_eps,
                layer_norm: config.layer_norm,
            })
        };
        let (heads, query, key) = (config.num_heads, config.query_dim(layer), config.heads[layer].head_dim);
        let order = |row: usize| self.source_of(query, row);
        let (mut operations, mut from) = (Vec::new(), Rows::Projected);
        if latent.query_rank > 0 {
            let tensor = self.part(Part::QueryUp, [heads * query, latent.query_rank])?;
            let piece = Piece::ordered(tensor.view()?, &order);
            let matrices = vec![(0, self.packing.pack(&[piece], false, None)?)];
            operations.push(Operation::Project(Project {
                norm: Some(Arc::new(norm(Part::QueryNorm, latent.query_rank)?)),
                ..Project::new(from, matrices, Rows::Queries)
            }));
            from = Rows::Queries;
        }
        let (keys, values) = self.heads_of_latents(latent)?;
        let (at, rotation) = (config.projected(layer) - key, self.rotation());
        let one = |at, size| Heads { at, count: 1, size };
        let mut steps = vec![TokenStep::Norm(norm(Part::LatentNorm, rank)?, one(at, rank), 0)];
        steps.extend(rotation.map(|by| TokenStep::Rotate(one(at + rank, key - rank), by)));
        steps.push(TokenStep::Store {
            layer: config.kv_layer(layer),
            keys: at,
            values: at,
        });
        operations.push(Operation::EachToken(steps));
        operations.push(Operation::PerHead(PerHead {
            matrices: keys,
            from: (from, query),
            to: (Rows::Fitted, key),
            beside: (key - rank, rotation),
        }));
        operations.push(self.attend((Rows::Fitted, 0), Rows::Latents)?);
        operations.push(Operation::PerHead(PerHead {
            matrices: values,
            from: (Rows::Latents, rank),
            to: (Rows::Attended, latent.value_dim),
            beside: (0, None),
        }));
        Ok(operations)
    }

    /// Returns the norms of queries, keys and values; `None` where the layer has none.
    fn head_norms(&self) -> Result<[Option<Norm>; 3]> {
        let config = self.config;
        let dim = config.heads[self.layer].head_dim;
        let [_, keys, _] = config.widths(self.layer);
        let with = |weight| Norm {
            weight,
            bias: None,
            eps: config.norm_eps,
            layer_norm: config.layer_norm,
        };
        let of = |part, heads| -> Result<Norm> {
            let weight = match config.qk_norm {
                HeadNorms::Heads => self.tensors.by_head(part, self.layer, "weight", (heads, dim))?,
                HeadNorms::Whole => self.vector(part, "weight", heads * dim)?,
                _ => self.vector(part, "weight", dim)?,
            };
            Ok(with(with_offset(self.tensors, config, self.apart(weight))))
        };
        let plain = || with(vec![1.0; dim]);
        let [queries, of_keys] = match config.qk_norm {
            HeadNorms::None => [None, None],
            HeadNorms::Plain => [(); 2].map(|()| config.rotary[self.layer].map(|_| plain())),
            _ => [
                Some(of(Part::QNorm, config.num_heads)?),
                (keys > 0).then(|| of(Part::KNorm, keys / dim)).transpose()?,
            ],
        };
        Ok([queries, of_keys, config.value_norm.then(plain)])
    }

    fn sinks(&self) -> Result<Option<Vec<f32>>> {
        if !self.config.sinks {
            return Ok(None);
        }
        let sinks = self.vector(Part::Sinks, "weight", self.config.num_heads)?;
        Ok(Some(sinks.iter().map(|sink| sink * std::f32::consts::LOG2_E).collect()))
    }

    /// Returns the parts of the first projection with their columns: queries, keys and values, or their latents.
    fn widths(&self) -> Vec<(Part, usize)> {
        let (config, dim) = (self.config, self.config.heads[self.layer].head_dim);
        match &config.latent {
            None => {
                let [queries, keys, values] = config.widths(self.layer);
                let queries = config.gates(self.layer) + queries;
                let all = [(Part::Q, queries), (Part::K, keys), (Part::V, values)].into_iter();
                all.filter(|(_, width)| *width > 0).collect()
            }
            Some(latent) if latent.query_rank > 0 => {
                vec![(Part::QueryDown, latent.query_rank), (Part::LatentDown, dim)]
            }
            Some(_) => vec![
                (Part::Q, config.num_heads * config.query_dim(self.layer)),
                (Part::LatentDown, dim),
            ],
        }
    }

    /// Returns the file's row for our `row` of queries or keys with heads of `dim` rows. Files with interleaved RoPE
    /// pairs are reordered to two halves. The RoPE rows come first in a head, or last in latent attention.
    fn source_of(&self, dim: usize, row: usize) -> usize {
        let rotated = self.config.rotary_dim(self.layer);
        let half = rotated / 2;
        let start = if self.config.latent.is_some() { dim - rotated } else { 0 };
        let (head, within) = (row / dim * dim + start, row % dim);
        if !self.tensors.files.interleaved || within < start || within >= start + rotated {
            return row;
        }
        let within = within - start;
        head + within % half * 2 + within / half
    }

    /// Returns each head's matrices to and from the latent space: one tensor in checkpoints, two in GGUF.
    fn heads_of_latents(&self, latent: &LatentConfig) -> Result<(Vec<Matrix>, Vec<Matrix>)> {
        let (heads, rank) = (self.config.num_heads, latent.rank);
        let (plain, size) = (latent.plain_dim, latent.value_dim);
        let as_it_is = |view: TensorView<'_>| self.packing.pack(&[Piece::new(view)], false, None);
        if self.tensors.has(Part::LatentKeys, self.at(), "weight") {
            let of = |part, shape: [usize; 3]| self.tensors.part(part, self.at(), &shape);
            let keys = of(Part::LatentKeys, [heads, rank, plain])?;
            let values = of(Part::LatentValues, [heads, size, rank])?;
            let (keys, values) = (keys.view()?, values.view()?);
            let all = |view: TensorView<'_>| -> Result<Vec<Matrix>> {
                (0..heads).map(|head| as_it_is(view.slice(head)?)).collect()
            };
            return Ok((all(keys)?, all(values)?));
        }
        let both = self.part(Part::LatentUp, [heads * (plain + size), rank])?;
        let both = both.view()?;
        let (of_key, of_value) = ([plain, rank], [size, rank]);
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for head in 0..heads {
            let data = &both.data()[head * (plain + size) * both.row_bytes()..];
            let (key, rest) = data.split_at(plain * both.row_bytes());
            let rest = &rest[..size * both.row_bytes()];
            keys.push(pack_transposed(
                &self.packing,
                TensorView::new(both.name(), both.kind(), &of_key, key)?,
            )?);
            values.push(as_it_is(TensorView::new(both.name(), both.kind(), &of_value, rest)?)?);
        }
        Ok((keys, values))
    }

    /// Returns the row of a fused QKV tensor for our `row`. Its rows may be grouped by KV head.
    fn source_of_qkv(&self, row: usize) -> usize {
        let heads = self.config.num_heads;
        let config::Heads {
            kv_heads,
            head_dim: dim,
            ..
        } = self.config.heads[self.layer];
        let (head, group) = (row / dim, heads / kv_heads);
        if !self.tensors.files.grouped {
            return if head < heads + kv_heads {
                self.source_of(dim, row)
            } else {
                row
            };
        }
        let (kv_head, within) = if head < heads {
            (head / group, head % group)
        } else {
            ((head - heads) % kv_heads, group + (head - heads) / kv_heads)
        };
        (kv_head * (group + 2) + within) * dim + row % dim
    }

    /// Returns true if queries, keys and values are one tensor. Some architectures have files of both forms.
    fn has_qkv(&self) -> bool {
        let files = &self.tensors.files;
        files.knows(Part::Qkv) && (!files.knows(Part::Q) || self.tensors.has(Part::Qkv, self.at(), "weight"))
    }

    fn apart(&self, numbers: Vec<f32>) -> Vec<f32> {
        let dim = self.config.heads[self.layer].head_dim;
        (0..numbers.len())
            .map(|row| numbers[self.source_of(dim, row)])
            .collect()
    }

    fn projections(&self) -> Result<Projections> {
        let hidden = self.config.hidden_size;
        let widths = self.widths();
        if self.has_qkv() {
            let rows = widths.iter().map(|(_, width)| width).sum();
            let (tensors, order) = (self.part(Part::Qkv, [rows, hidden])?, |row| self.source_of_qkv(row));
            let piece = if self.tensors.files.grouped || self.tensors.files.interleaved {
                Piece::ordered(tensors.view()?, &order)
            } else {
                Piece::new(tensors.view()?)
            };
            return Ok(vec![(0, self.packing.pack(&[piece], false, None)?)]);
        }
        let (gates, dim) = (self.config.gates(self.layer), self.config.query_dim(self.layer));
        let of_query = |row: usize| {
            // files have each head's query, then its gate; here all gates come first
            let within = row % gates.max(1);
            match gates {
                0 => self.source_of(dim, row),
                _ => within + (within / dim + usize::from(row < gates)) * dim,
            }
        };
        let of_key = |row: usize| self.source_of(self.config.heads[self.layer].head_dim, row);
        let tensors = widths
            .iter()
            .map(|(part, width)| self.part(*part, [*width, hidden]))
            .collect::<Result<Vec<_>>>()?;
        let views: Vec<TensorView<'_>> = tensors.iter().map(ModelTensor::view).collect::<Result<_>>()?;
        let pieces: Vec<Piece<'_>> = views
            .iter()
            .zip(&widths)
            .map(|(view, (part, _))| match part {
                Part::Q if self.tensors.files.interleaved || gates > 0 => Piece::ordered(*view, &of_query),
                Part::K | Part::LatentDown if self.tensors.files.interleaved => Piece::ordered(*view, &of_key),
                _ => Piece::new(*view),
            })
            .collect();
        side_by_side(&self.packing, &pieces)
    }

    fn qkv_bias(&self) -> Result<Option<Vec<f32>>> {
        if !self.config.qkv_bias {
            return Ok(None);
        }
        let widths = self.widths();
        if self.has_qkv() {
            let rows = widths.iter().map(|(_, width)| width).sum();
            let bias = self.vector(Part::Qkv, "bias", rows)?;
            return Ok(Some(padded(
                (0..rows).map(|row| bias[self.source_of_qkv(row)]).collect(),
            )));
        }
        let mut all = Vec::new();
        for (part, width) in widths {
            let bias = self.vector(part, "bias", width)?;
            all.extend(if part == Part::V { bias } else { self.apart(bias) });
        }
        Ok(Some(padded(all)))
    }
}
