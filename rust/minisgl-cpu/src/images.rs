//! Images of prompts: the features that a vision tower has computed, by digest, and where images lie in the sequences.
//!
//! Invariants: features of an image that a slot has yet to compute stay; others are dropped when they exceed the limit,
//! the least recently used first; a tower that fails fails the rows that need the image, and no other: its features are
//! NaN, so that the row's pages cannot serve another request; a slot without images has equal positions on all axes.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::model::{Tower, TowerRun};
use crate::step::Step;
use crate::threads::Pool;

/// Smallest virtual id (mirrors `python/minisgl/prompt_image.py`): ids from here on stand for positions of images.
pub const FIRST_VIRTUAL_ID: u32 = 1 << 30;
const NO_TOWER: &str = "images: the model does not see: it has no vision tower";

/// Digest of an image, by which its features are found.
pub type Digest = [u8; 32];

/// Image of a prompt.
#[derive(Clone, Debug)]
pub struct PromptImage {
    /// Digest of the pixels and of the kind of tower.
    pub digest: Digest,
    /// Position of the image's first token.
    pub start: usize,
    /// Number of tokens of the image.
    pub num_tokens: usize,
    /// Rows and columns of patches.
    pub grid: [usize; 2],
    /// Pixels in the order of the tower's patches, [patches, values].
    pub pixels: Arc<[u8]>,
}

/// Counts of images since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageCounts {
    /// Images that the tower has computed.
    pub runs: u64,
    /// Images whose features were found.
    pub hits: u64,
    /// Images whose features are there now.
    pub images: usize,
    /// Bytes of these features.
    pub bytes: usize,
}

/// Features of an image, [tokens, width]. As long as they are held, they stay in the cache.
pub type Features = Arc<[f32]>;

/// Result of a call that computes an image for a request without a slot.
pub enum Ahead {
    /// The image is not computed yet. The caller must call again.
    Unfinished,
    /// The image is computed and has these features.
    Seen(Features),
    /// The computation failed. The step that needs the image will fail in the same way and report why.
    Failed,
}

/// Image in the sequence of a slot.
struct Place {
    image: PromptImage,
    /// Rows and columns of tokens.
    tokens: [usize; 2],
    /// Features from the first chunk that needs some to the end of the last.
    features: Option<Features>,
}

impl Place {
    fn end(&self) -> usize {
        self.image.start + self.image.num_tokens
    }

    /// Returns by how much positions after the image exceed their place on the axes.
    fn shift(&self) -> usize {
        self.image.num_tokens - self.tokens[0].max(self.tokens[1])
    }
}

/// Features and positions of a step's tokens. Empty if no slot of the step has images.
#[derive(Default)]
pub(crate) struct StepImages<'a> {
    /// Features of each token; `None` for a token of text.
    pub features: Vec<Option<&'a [f32]>>,
    /// Position of each token by axis.
    pub axes: Vec<[u32; 3]>,
    /// End of the positions that each token attends to; empty if none attends to later ones.
    pub ends: Vec<u32>,
}

/// Vision tower, features by digest, and images by slot.
pub(crate) struct Images {
    tower: Tower,
    limit: usize,
    /// Features with the time of their last use.
    features: HashMap<Digest, (Features, u64)>,
    /// Image whose tower runs ahead of its request, if one has begun.
    ahead: Option<(Digest, TowerRun)>,
    clock: u64,
    slots: Vec<Vec<Place>>,
    counts: ImageCounts,
    /// Features of a token whose tower has failed.
    unknown: Vec<f32>,
    /// Rows of the current step whose tower has failed, with the reasons.
    failed: Vec<(usize, String)>,
}

impl Images {
    /// Creates the store for `num_slots` slots. Features take up to `limit` bytes, and more only while slots need them.
    pub fn new(tower: Tower, limit: usize, num_slots: usize) -> Self {
        Self {
            unknown: vec![f32::NAN; tower.width()],
            tower,
            limit,
            features: HashMap::new(),
            ahead: None,
            clock: 0,
            slots: (0..num_slots).map(|_| Vec::new()).collect(),
            counts: ImageCounts::default(),
            failed: Vec::new(),
        }
    }

    /// Returns the vision tower.
    pub fn tower(&self) -> &Tower {
        &self.tower
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> ImageCounts {
        ImageCounts {
            images: self.features.len(),
            ..self.counts
        }
    }

    /// Forgets the images of a slot.
    pub fn free(&mut self, slot: usize) {
        if let Some(places) = self.slots.get_mut(slot) {
            places.clear();
            self.evict();
        }
    }

    /// Sets the images of a slot's new request, by start. Errors if one does not fit the tower or overlaps the last.
    pub fn bind(&mut self, slot: usize, images: Vec<PromptImage>) -> Result<()> {
        let (mut places, mut end) = (Vec::with_capacity(images.len()), 0);
        for image in images {
            let tokens = self.tower.tokens_of(image.grid, image.pixels.len());
            let fits = |tokens: &[usize; 2]| tokens[0] * tokens[1] == image.num_tokens && image.start >= end;
            let Some(tokens) = tokens.filter(fits) else {
                let ([rows, columns], bytes) = (image.grid, image.pixels.len());
                return Err(Error::step(format!(
                    "images: {} tokens at {} for {rows} x {columns} patches of {bytes} bytes: does not fit",
                    image.num_tokens, image.start
                )));
            };
            end = image.start + image.num_tokens;
            let found = self.features.get(&image.digest).map(|(features, _)| features);
            let held = found.filter(|features| Arc::strong_count(features) > 1 && self.fits(features, &image));
            places.push(Place {
                features: held.cloned(),
                image,
                tokens,
            });
        }
        self.slots[slot] = places;
        Ok(())
    }

    /// Runs the tower for all images that the rows of `step` need and whose features are not there.
    pub fn prepare(&mut self, step: &Step, pool: &mut Pool) {
        self.failed.clear();
        for (row, (slot, all)) in step.req_slots.iter().zip(&step.seq_lens).enumerate() {
            let (slot, all) = (*slot as usize, *all as usize);
            let first = all - step.extend_lens[row] as usize;
            for at in 0..self.slots[slot].len() {
                let place = &self.slots[slot][at];
                if place.image.start >= all || place.end() <= first || place.features.is_some() {
                    continue;
                }
                match self.features_of(&place.image.clone(), pool) {
                    Ok(features) => self.slots[slot][at].features = Some(features),
                    Err(error) => self.failed.push((row, error.to_string())),
                }
            }
        }
    }

    /// Runs the tower over an image ahead of its request for about `slice`, at least for one work item. `begins`: the
    /// image is the first of its request, and waits while held features exceed the limit.
    pub fn see_ahead(&mut self, image: &PromptImage, begins: bool, slice: Duration, pool: &mut Pool) -> Ahead {
        self.evict();
        if let Some(features) = self.found(image) {
            return Ahead::Seen(features);
        }
        if begins && self.counts.bytes > self.limit {
            return Ahead::Unfinished;
        }
        let tokens = self.tower.tokens_of(image.grid, image.pixels.len());
        if tokens.is_none_or(|[rows, columns]| rows * columns != image.num_tokens) {
            return Ahead::Failed;
        }
        // its memory goes before another run takes as much
        self.ahead = self.ahead.take().filter(|(digest, _)| *digest == image.digest);
        match self.compute(image, slice, pool) {
            Ok(Some(features)) => Ahead::Seen(features),
            Ok(None) => Ahead::Unfinished,
            Err(_) => Ahead::Failed,
        }
    }

    /// Continues to compute an image for about `slice`, from what `see_ahead` has begun. `None` if that was not enough.
    fn compute(&mut self, image: &PromptImage, slice: Duration, pool: &mut Pool) -> Result<Option<Features>> {
        let (tower, begun) = (&self.tower, self.ahead.take_if(|(digest, _)| *digest == image.digest));
        let work = || -> Result<std::result::Result<Vec<f32>, TowerRun>> {
            let mut run = begun.map_or_else(|| tower.begin(pool, image.grid), |(_, run)| Ok(run))?;
            let has_ended = tower.advance(&mut run, pool, &image.pixels, slice)?;
            if has_ended { run.finish().map(Ok) } else { Ok(Err(run)) }
        };
        let done = catch_unwind(AssertUnwindSafe(work));
        match done.unwrap_or_else(|_| Err(Error::step("the tower panicked")))? {
            Ok(features) => Ok(Some(self.keep(image.digest, features.into()))),
            Err(run) => {
                self.ahead = Some((image.digest, run));
                Ok(None)
            }
        }
    }

    /// Gives up the tower's run ahead of a request that has ended.
    pub fn give_up(&mut self) {
        self.ahead = None;
    }

    fn fits(&self, features: &Features, image: &PromptImage) -> bool {
        features.len() == image.num_tokens * self.tower.width()
    }

    /// Returns the features of an image that are in the cache, and counts that.
    fn found(&mut self, image: &PromptImage) -> Option<Features> {
        self.clock += 1;
        let width = self.tower.width();
        let (features, used) = self.features.get_mut(&image.digest)?;
        if features.len() != image.num_tokens * width {
            return None;
        }
        (*used, self.counts.hits) = (self.clock, self.counts.hits + 1);
        Some(features.clone())
    }

    fn features_of(&mut self, image: &PromptImage, pool: &mut Pool) -> Result<Features> {
        if let Some(features) = self.found(image) {
            return Ok(features);
        }
        let features = self.compute(image, Duration::MAX, pool)?;
        features.ok_or_else(|| Error::step("the tower did not end"))
    }

    /// Puts computed features into the cache.
    fn keep(&mut self, digest: Digest, features: Features) -> Features {
        self.counts.runs += 1;
        self.counts.bytes += size_of_val(&features[..]);
        if let Some((old, _)) = self.features.insert(digest, (features.clone(), self.clock)) {
            self.counts.bytes -= size_of_val(&old[..]);
        }
        self.evict();
        features
    }

    /// Returns the rows of the current step whose tower has failed, with the reasons.
    pub fn failed(&self) -> &[(usize, String)] {
        &self.failed
    }

    /// Returns features and positions of the tokens of `step`.
    pub fn for_step(&self, step: &Step) -> StepImages<'_> {
        let mut found = StepImages::default();
        if step.req_slots.iter().all(|slot| self.slots[*slot as usize].is_empty()) {
            return found;
        }
        let width = self.tower.width();
        for (row, slot) in step.req_slots.iter().enumerate() {
            let (mut next, places) = (found.axes.len(), &self.slots[*slot as usize]);
            let end = next + step.extend_lens[row] as usize;
            while next < end {
                let position = step.positions[next] as usize;
                let before = places.partition_point(|place| place.end() <= position);
                let shift: usize = places[..before].iter().map(Place::shift).sum();
                let place = places.get(before).filter(|place| place.image.start <= position);
                if self.tower.both_ways {
                    found.ends.push(place.map_or(position + 1, Place::end) as u32);
                }
                let Some(place) = place else {
                    found.axes.push([(position - shift) as u32; 3]);
                    found.features.push(None);
                    next += 1;
                    continue;
                };
                let (begin, at) = (place.image.start - shift, position - place.image.start);
                let axes = [begin, begin + at / place.tokens[1], begin + at % place.tokens[1]];
                found.axes.push(axes.map(|axis| axis as u32));
                let features = place.features.as_deref();
                let own = features.map_or(&self.unknown[..], |features| &features[at * width..][..width]);
                found.features.push(Some(own));
                next += 1;
            }
        }
        found
    }

    /// Returns the length that a row of `slot` must have if it has `len` tokens: if they end within an image whose tokens
    /// attend to each other, all of the image.
    pub fn whole(&self, slot: usize, len: usize) -> usize {
        let cut = |place: &&Place| self.tower.both_ways && place.image.start < len && len < place.end();
        self.slots[slot].iter().find(cut).map_or(len, Place::end)
    }

    /// Lets go of the features that the rows of a computed `step` have passed.
    pub fn computed(&mut self, step: &Step) {
        for (slot, all) in step.req_slots.iter().zip(&step.seq_lens) {
            for place in &mut self.slots[*slot as usize] {
                if place.end() <= *all as usize {
                    place.features = None;
                }
            }
        }
        self.evict();
    }

    /// Drops the least recently used features beyond the limit, except those that a slot holds.
    fn evict(&mut self) {
        while self.counts.bytes > self.limit {
            let unused = self
                .features
                .iter()
                .filter(|(_, (features, _))| Arc::strong_count(features) == 1);
            let Some(oldest) = unused.min_by_key(|(_, (_, used))| *used).map(|(digest, _)| *digest) else {
                return;
            };
            if let Some((features, _)) = self.features.remove(&oldest) {
                self.counts.bytes -= size_of_val(&features[..]);
            }
        }
    }
}

/// Returns the error for a request with images of a model without a vision tower.
pub(crate) fn no_tower() -> Error {
    Error::step(NO_TOWER)
}
