//! Tests of the panel cache: panels are read back as they were packed, whatever happened to the file.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use super::kept::ChunkedWriter;
use super::{Cache, Keeping, Packer};
use crate::files::Source;
use crate::files::kept::{Checksum, Partial};

#[path = "../../../minisgl-kernels/src/panels/tests/stored.rs"]
mod stored;

use minisgl_kernels::panels::{Matrix, Part};
use minisgl_kernels::{Kind, TensorView};
use stored::stored;

/// Temporary folder that is removed when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("minisgl-{}-panels-{name}", std::process::id())))
    }

    fn cache(&self, limit: u64) -> Cache {
        Cache {
            folder: self.0.clone(),
            limit,
            least: 0,
        }
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).map(|found| found.map(|one| one.unwrap().file_name()));
        let mut names: Vec<_> = entries.unwrap().map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Returns the only panel file. Fails if there are more.
    fn file(&self) -> PathBuf {
        let mut names = self.names();
        names.retain(|name| name.ends_with(".panels"));
        assert_eq!(names.len(), 1, "{names:?}");
        self.0.join(&names[0])
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

/// Source of two tensors.
struct Model([Vec<u8>; 2]);

const SHAPE: [usize; 2] = [40, 512];
const KINDS: [Kind; 2] = [Kind::Q4_K, Kind::Q6_K];
const NAMES: [&str; 2] = ["one", "two"];

impl Model {
    fn new(seed: u32) -> Self {
        Self(KINDS.map(|kind| stored(kind, SHAPE[0], SHAPE[1], seed)))
    }

    /// Loads matrices of two parts of the model, with the rows of one reversed if `turned`.
    fn load(&self, cache: &Cache, turned: bool) -> (Vec<Matrix>, Option<Keeping>, bool) {
        let packer = Packer::new(&[self], Some(cache));
        let order = |row: usize| if turned { SHAPE[0] - 1 - row } else { row };
        let [one, two] = [0, 1].map(|i| self.tensor(NAMES[i]).unwrap());
        let (first, second) = (packer.part(0), packer.part(1));
        let matrices = vec![
            second.pack(&[Part::new(two)], false, None).unwrap(),
            first.pack(&[Part::ordered(one, &order)], false, None).unwrap(),
            first.pack(&[Part::new(one), Part::new(one)], true, None).unwrap(),
            second
                .pack(&[Part::new(one), Part::new(two)], false, Some(Kind::F32))
                .unwrap(),
        ];
        let (keeping, whole) = packer.end();
        (matrices, keeping, whole)
    }

    /// Writes the cache and returns the bytes of its file.
    fn keep(&self, cache: &Cache) -> u64 {
        let (_, keeping, _) = self.load(cache, false);
        keeping.unwrap().write(&AtomicBool::new(false)).unwrap().unwrap()
    }
}

impl Source for Model {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let i = NAMES.iter().position(|own| *own == name)?;
        TensorView::new(NAMES[i], KINDS[i], &SHAPE, &self.0[i]).ok()
    }

    fn names(&self) -> Vec<&str> {
        NAMES.to_vec()
    }
}

fn same(one: &[Matrix], other: &[Matrix]) -> bool {
    let alike = |(a, b): (&Matrix, &Matrix)| (a.n(), a.k(), a.kind(), a.data()) == (b.n(), b.k(), b.kind(), b.data());
    one.len() == other.len() && one.iter().zip(other).all(alike)
}

#[test]
fn layout_of_panels_matches_the_cache_version() {
    let mut sum = Checksum::new();
    for kind in Kind::ALL {
        let shape = [37, if kind.block_len() == 1 { 75 } else { 512 }];
        let data = stored(kind, shape[0], shape[1], 5);
        let parts = [Part::new(TensorView::new("t", kind, &shape, &data).unwrap()); 2];
        sum.add(Matrix::pack(&parts[..1], false, None).unwrap().data());
        sum.add(Matrix::pack(&parts, true, Some(Kind::F32)).unwrap().data());
    }
    assert_eq!(
        sum.end(),
        13_487_213_627_686_067_721,
        "the layout of panels has changed: raise VERSION in kept.rs"
    );
}

const LARGE: u64 = 1 << 30;

#[test]
fn cached_panels_are_mapped_unchanged() {
    let (folder, model) = (Folder::new("back"), Model::new(1));
    let cache = folder.cache(LARGE);
    let (packed, keeping, whole) = model.load(&cache, false);
    assert!(!whole);
    let size = keeping.unwrap().write(&AtomicBool::new(false)).unwrap().unwrap();
    assert_eq!(fs::metadata(folder.file()).unwrap().len(), size);
    assert_eq!(folder.names().len(), 2, "{:?}", folder.names()); // the panels and the lock
    let (mapped, keeping, whole) = model.load(&cache, false);
    assert!(whole && keeping.is_none() && same(&packed, &mapped));
    assert!(mapped.iter().all(|one| one.data().as_ptr().addr().is_multiple_of(64)));
}

#[test]
fn small_model_is_not_cached() {
    let (folder, model) = (Folder::new("small"), Model::new(1));
    let cache = Cache {
        least: LARGE,
        ..folder.cache(LARGE)
    };
    assert!(model.load(&cache, false).1.is_none());
}

#[test]
fn damaged_or_foreign_panel_file_is_rebuilt() {
    let (folder, model) = (Folder::new("damaged"), Model::new(1));
    let cache = folder.cache(LARGE);
    let (packed, keeping, _) = model.load(&cache, false);
    keeping.unwrap().write(&AtomicBool::new(false)).unwrap().unwrap();
    let file = folder.file();
    let good = fs::read(&file).unwrap();
    let mut damages = vec![
        Vec::new(),
        good[..100].to_vec(),
        good[..good.len() - 1].to_vec(),
        b"GGUF".to_vec(),
    ];
    for at in [
        0,
        8,
        16,
        24,
        40,
        60,
        200,
        324,
        good.len() / 3,
        good.len() / 2,
        good.len() - 1,
    ] {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        damages.push(bytes);
    }
    for (i, damaged) in damages.into_iter().enumerate() {
        fs::remove_file(&file).unwrap(); // a mapped file must not be modified, so it is replaced
        fs::write(&file, damaged).unwrap();
        let (found, keeping, whole) = model.load(&cache, false);
        assert!(!whole && same(&packed, &found), "damage {i}");
        keeping.unwrap().write(&AtomicBool::new(false)).unwrap().unwrap();
        assert!(fs::read(&file).unwrap() == good, "damage {i}");
    }
}

#[test]
fn panels_of_other_weights_or_row_orders_are_not_used() {
    let folder = Folder::new("other");
    let cache = folder.cache(LARGE);
    let (one, other) = (Model::new(1), Model::new(2));
    one.keep(&cache);
    let (found, _, whole) = other.load(&cache, false);
    assert!(!whole && same(&found, &other.load(&folder.cache(0), false).0));
    let file = folder.file();
    other.keep(&cache);
    assert_eq!(folder.names().len(), 3); // one file per model, and the lock
    assert!(file.is_file());
    let (turned, keeping, whole) = one.load(&cache, true);
    assert!(!whole && keeping.is_some());
    assert!(same(&turned, &one.load(&Folder::new("none").cache(0), true).0));
    assert!(!same(&turned, &one.load(&cache, false).0));
}

#[test]
fn concurrent_writers_leave_one_valid_file_per_model() {
    let (folder, models) = (Folder::new("several"), [1, 1, 1, 2, 2].map(Model::new));
    let cache = folder.cache(LARGE);
    let loaded: Vec<_> = models.iter().map(|model| model.load(&cache, false)).collect();
    std::thread::scope(|scope| {
        for (_, keeping, _) in loaded {
            scope.spawn(|| keeping.unwrap().write(&AtomicBool::new(false)).unwrap().unwrap());
        }
    });
    assert_eq!(folder.names().len(), 3, "{:?}", folder.names());
    assert!(models.iter().all(|model| model.load(&cache, false).2));
}

#[test]
fn stopped_write_leaves_no_file() {
    let (folder, model) = (Folder::new("stops"), Model::new(1));
    let (_, keeping, _) = model.load(&folder.cache(LARGE), false);
    assert_eq!(keeping.unwrap().write(&AtomicBool::new(true)).unwrap(), None);
    assert_eq!(folder.names(), ["lock"]);
}

#[test]
fn stopped_wait_leaves_the_temporary_file_of_another_writer() {
    let (folder, model) = (Folder::new("waits"), Model::new(1));
    let cache = folder.cache(LARGE);
    model.keep(&cache);
    let file = folder.file();
    fs::remove_file(&file).unwrap();
    let (_, keeping, _) = model.load(&cache, false);
    let lock = fs::File::create(folder.0.join("lock")).unwrap();
    lock.lock().unwrap();
    let partial = Partial::for_file(&file).unwrap(); // the name that another engine in this process would use
    fs::write(partial.path(), b"half").unwrap();
    assert_eq!(keeping.unwrap().write(&AtomicBool::new(true)).unwrap(), None);
    assert!(partial.path().is_file());
}

#[test]
fn least_recently_used_file_is_evicted() {
    let (folder, models) = (Folder::new("limit"), [1, 2, 3].map(Model::new));
    let size = models[0].keep(&folder.cache(LARGE));
    let two = folder.cache(2 * size);
    let first = folder.file();
    models[1].keep(&two);
    let hour = |ago: u64| SystemTime::now() - Duration::from_secs(3600 * ago);
    for name in folder.names().iter().filter(|name| name.ends_with(".panels")) {
        let path = folder.0.join(name);
        let ago = if path == first { 2 } else { 1 };
        fs::File::open(path).unwrap().set_modified(hour(ago)).unwrap();
    }
    fs::write(
        folder.0.join("0123456789abcdef.panels.1.partial"),
        b"of one who was killed",
    )
    .unwrap();
    let (mapped, _, whole) = models[0].load(&two, false); // counts as a use
    assert!(whole);
    models[2].keep(&two);
    assert_eq!([0, 1, 2].map(|i| models[i].load(&two, false).2), [true, false, true]);
    assert_eq!(folder.names().len(), 3, "{:?}", folder.names());
    fs::remove_file(&first).unwrap();
    assert!(same(&mapped, &models[0].load(&Folder::new("no").cache(0), false).0)); // the deleted file is still mapped

    let error = |cache: &Cache| {
        let (_, keeping, _) = Model::new(4).load(cache, false);
        keeping.unwrap().write(&AtomicBool::new(false)).unwrap_err().to_string()
    };
    let text = error(&folder.cache(size - 1));
    assert!(
        text.contains(&format!("needs {size} bytes; the cache limit is {}", size - 1)),
        "{text}"
    );
    assert_eq!(folder.names().len(), 2);
    let within = Cache {
        folder: first.join("panels"),
        ..two
    };
    fs::write(&first, b"a file where a folder should be").unwrap();
    assert!(error(&within).contains("Not a directory"));
}

#[cfg(unix)]
#[test]
fn eviction_leaves_links_and_files_of_other_names() {
    let (folder, models) = (Folder::new("foreign"), [1, 2].map(Model::new));
    let size = models[0].keep(&folder.cache(LARGE));
    let evicted = folder.file();
    let others = ["mine.panels", "notes.partial", "0123456789abcdef.panels.old"].map(|name| folder.0.join(name));
    for other in &others {
        fs::write(other, b"of somebody else").unwrap();
    }
    let link = folder.0.join("fedcba9876543210.panels");
    std::os::unix::fs::symlink(&others[0], &link).unwrap();
    models[1].keep(&folder.cache(size));
    assert!(!evicted.exists());
    assert!(
        others.iter().chain([&link]).all(|path| path.exists()),
        "{:?}",
        folder.names()
    );
}

#[cfg(target_os = "linux")]
#[test]
fn write_to_a_full_disk_is_an_error() {
    let mut out = ChunkedWriter::create(Path::new("/dev/full")).unwrap();
    let error = out.add(&vec![1; 5 << 20]).unwrap_err().to_string();
    assert!(error.contains("/dev/full: No space left on device"), "{error}");
}
