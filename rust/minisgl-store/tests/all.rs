//! Tests of the store as engines and users see it, with faults of disks and other processes.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use minisgl_store::{Folder, Keeper, Kind, Store, digest_of_files, first_key, first_key_in, keys};
use tempfile::TempDir;

const SIZE: usize = 4;
const BYTES: usize = 1000;
const PATIENCE: Duration = Duration::from_secs(60);

fn page(number: usize) -> Vec<u8> {
    (0..BYTES).map(|at| (at * 31 + number * 7) as u8).collect()
}

fn text(length: usize) -> Vec<i32> {
    (0..length as i32).collect()
}

fn open(root: &Path, limit: u64, identity: &[u8]) -> Store {
    Store::open(root, limit, identity, SIZE, BYTES).expect("a folder")
}

/// Writes the pages of a sequence.
fn filled(root: &Path, tokens: &[i32]) {
    let store = open(root, 1 << 30, b"model");
    for (number, key) in keys(store.first_key(), tokens, SIZE).into_iter().enumerate() {
        store.enqueue(Kind::Page, key, || page(number));
    }
    store.flush(PATIENCE);
}

fn files(root: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(root)
        .expect("a folder")
        .map(|one| one.expect("an entry").path());
    let mut found: Vec<PathBuf> = folders
        .filter(|one| one.is_dir())
        .flat_map(|one| fs::read_dir(one).expect("a folder"))
        .map(|one| one.expect("an entry").path())
        .collect();
    found.sort();
    found
}

#[test]
fn pages_of_one_process_are_read_by_another() {
    let root = TempDir::new().expect("a folder");
    let root = root.path().join("made/here");
    filled(&root, &text(22));
    let store = open(&root, 1 << 30, b"model");
    let staged = store.stage(b"", &text(40), 0, 100);
    assert_eq!(staged.columns(), (0, 5), "whole pages");
    assert!((0..5).all(|column| staged.page(column) == Some(&page(column)[..])));
    let staged = store.stage(b"", &text(40), 2, 2);
    assert_eq!((staged.columns(), staged.page(1), staged.page(4)), ((2, 4), None, None));
    assert_eq!(staged.page(3), Some(&page(3)[..]));
    assert_eq!(store.counts().loaded, 7);
    assert!(store.has(&text(22), 4) && !store.has(&text(22), 5));
    let mut other = text(40);
    other[9] = 77;
    assert_eq!(
        store.stage(b"", &other, 0, 100).columns(),
        (0, 2),
        "all tokens before count"
    );
    let other = open(&root, 1 << 30, b"another model");
    assert_eq!(other.stage(b"", &text(40), 0, 100).columns(), (0, 0));
}

#[test]
fn files_are_readable_by_owner_only() {
    let parent = TempDir::new().expect("a folder");
    let root = parent.path().join("cache");
    filled(&root, &text(8));
    let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    assert_eq!(mode(&root), 0o700);
    for file in files(&root) {
        assert_eq!((mode(&file), mode(file.parent().expect("a folder"))), (0o600, 0o700));
    }
}

/// Changes every byte of a file, cuts it to each length, and replaces it by each other file.
#[test]
fn damaged_page_is_not_read_and_is_removed() {
    let root = TempDir::new().expect("a folder");
    let root = root.path();
    let tokens = text(12);
    filled(root, &tokens);
    let all: Vec<(PathBuf, Vec<u8>)> = files(root)
        .into_iter()
        .map(|file| (file.clone(), fs::read(file).expect("a file")))
        .collect();
    let store = open(root, 1 << 30, b"model");
    let mut damaged = 0;
    let mut check = |file: &Path, whole: &[u8], wrong: &[u8]| {
        fs::write(file, wrong).expect("a file");
        let staged = store.stage(b"", &tokens, 0, 3);
        let (_, end) = staged.columns();
        assert!(end < 3 && (0..end).all(|column| staged.page(column) == Some(&page(column)[..])));
        assert!(!file.exists(), "it would be read again and again");
        fs::write(file, whole).expect("a file");
        damaged += 1;
    };
    for (file, whole) in &all {
        for at in (0..whole.len()).step_by(3) {
            let mut wrong = whole.clone();
            wrong[at] ^= 1 << (at % 8);
            check(file, whole, &wrong);
        }
        for length in (0..whole.len()).step_by(41) {
            check(file, whole, &whole[..length]);
        }
        check(file, whole, &[whole, &[0_u8][..]].concat());
    }
    for (file, whole) in &all {
        for (other, wrong) in &all {
            if other != file {
                check(file, whole, wrong);
            }
        }
    }
    assert_eq!(store.counts().damaged, damaged);
    assert!(damaged > 1000);
    assert_eq!(store.stage(b"", &tokens, 0, 3).columns(), (0, 3), "and whole again");
    fs::write(&all[0].0, "no page").expect("a file");
    let totals = Folder::open(root, 1)
        .and_then(|folder| folder.verify())
        .expect("a folder");
    assert_eq!((totals.pages, totals.damaged), (2, 1));
    assert!(!all[0].0.exists());
}

/// A pseudo-random number generator.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 27)) >> 16) as usize % end
    }

    /// Damages a file: changes its bytes or length, or replaces it by another file, a folder, a pipe or a link.
    fn damage(&mut self, file: &Path, others: &[PathBuf]) {
        let read = |file: &Path| match file.is_file() {
            true => fs::read(file).expect("a file"),
            false => Vec::new(), // already removed, or a pipe
        };
        let mut data = read(file);
        let other = &others[self.below(others.len())];
        let what = self.below(100);
        if what < 50 && !data.is_empty() {
            for _ in 0..=self.below(8) {
                let at = self.below(data.len());
                data[at] ^= 1 << self.below(8);
            }
        } else if what < 65 {
            data.truncate(self.below(data.len() + 1));
        } else if what < 70 {
            data.extend((0..=self.below(300)).map(|at| at as u8));
        } else if what < 90 {
            data = read(other);
        }
        let _ = fs::remove_file(file).or_else(|_| fs::remove_dir_all(file));
        let done = match what {
            0..90 => fs::write(file, data),
            90..92 => fs::create_dir(file),
            92..94 => symlink(other, file),
            94..96 => symlink(file, file),
            96 => symlink("/dev/zero", file),
            97 => Command::new("mkfifo").arg(file).status().map(drop),
            _ => Ok(()),
        };
        done.expect("a folder that can be written");
    }
}

/// Runs `PROPTEST_CASES` stores; `make slow-test` runs 100,000.
#[test]
fn damaged_stores_return_right_pages_or_none() {
    let cases = std::env::var("PROPTEST_CASES").map_or(100, |cases| cases.parse().expect("a number"));
    let shm = Path::new("/dev/shm");
    let root = if shm.is_dir() {
        TempDir::new_in(shm)
    } else {
        TempDir::new()
    }
    .expect("a folder");
    let (root, foreign) = (root.path().join("ours"), root.path().join("foreign"));
    let tokens = text(8 * SIZE);
    filled(&root, &tokens);
    let other = open(&foreign, 1 << 30, b"another model");
    for (number, key) in keys(other.first_key(), &tokens, SIZE).into_iter().enumerate() {
        other.enqueue(Kind::Page, key, || page(number + 9));
    }
    other.flush(PATIENCE);
    let ours = files(&root);
    let all = [ours.clone(), files(&foreign)].concat();
    let (mut chance, mut found, mut damaged) = (Chance(7), 0, 0);
    for case in 0..cases {
        for _ in 0..=chance.below(3) {
            let file = chance.below(ours.len());
            chance.damage(&ours[file], &all);
        }
        if chance.below(50) == 0 {
            Folder::existing(&root)
                .and_then(|folder| folder.verify())
                .expect("a folder");
        }
        let store = open(&root, 1 << 30, b"model");
        let mut whole = 0;
        for _ in 0..=ours.len() {
            let staged = store.stage(b"", &tokens, 0, ours.len());
            whole = staged.columns().1;
            found += whole;
            assert!(
                (0..whole).all(|column| staged.page(column) == Some(&page(column)[..])),
                "case {case}"
            );
            if whole == ours.len() {
                break;
            }
            for (number, key) in keys(store.first_key(), &tokens, SIZE).into_iter().enumerate() {
                store.enqueue(Kind::Page, key, || page(number)); // as if it was computed again
            }
            store.flush(PATIENCE);
        }
        damaged += store.counts().damaged;
        drop(store);
        let is_folder = |file: &&PathBuf| fs::symlink_metadata(file).is_ok_and(|data| data.is_dir());
        for file in ours.iter().filter(is_folder) {
            fs::remove_dir(file).expect("an empty one, which no page can replace");
            whole = ours.len();
        }
        assert_eq!(whole, ours.len(), "case {case}: what was computed is there again");
        if files(&root).len() < ours.len() {
            filled(&root, &tokens);
        }
    }
    println!("{cases} stores, {damaged} damaged pages, {found} whole ones read");
    assert!(damaged * 2 > cases && found > 0);
}

#[test]
fn put_writes_only_pages_that_fit_the_store() {
    let root = TempDir::new().expect("a folder");
    let store = open(root.path(), 1 << 30, b"model");
    let pages: Vec<Vec<u8>> = (1..3).map(page).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    store.put(&text(14), 1, &pages).expect("a folder");
    let staged = store.stage(b"", &text(14), 1, 5);
    assert_eq!((staged.columns(), staged.page(2)), ((1, 3), Some(&page(2)[..])));
    assert!(store.put(&text(14), 2, &pages).is_err(), "beyond the text");
    assert!(store.put(&text(14), 0, &[&pages[0][1..]]).is_err(), "of another size");
}

/// Pages that a slow disk cannot take are dropped, counted, and queued again later.
#[test]
fn slow_disk_drops_pages_without_blocking() {
    let root = TempDir::new().expect("a folder");
    let store = Store::open(root.path(), 1 << 30, b"model", SIZE, 64 << 20).expect("a folder"); // at most 4 are queued
    store.slow_down(Duration::from_secs(3600));
    let all = keys(store.first_key(), &text(12 * SIZE), SIZE);
    for key in &all {
        store.enqueue(Kind::Page, *key, || vec![1]);
    }
    let counts = store.counts();
    assert!((7..=8).contains(&counts.dropped) && counts.written == 0, "{counts:?}");
}

#[test]
fn sweep_removes_least_recently_used_first() {
    let root = TempDir::new().expect("a folder");
    let root = root.path();
    let (old, new) = (text(40), vec![5; 32]);
    filled(root, &old[..4 * SIZE]);
    let oldest = files(root); // the page behind those that are used again is among them
    filled(root, &old);
    for path in files(root) {
        let age = std::time::Duration::from_secs(if oldest.contains(&path) { 2000 } else { 1000 });
        fs::File::open(path)
            .and_then(|file| file.set_modified(std::time::SystemTime::now() - age))
            .expect("a file");
    }
    let each = fs::metadata(&files(root)[0]).expect("a file").len();
    let store = open(root, 12 * each, b"model");
    assert_eq!(store.stage(b"", &old, 0, 3).columns(), (0, 3), "they are used");
    for (number, key) in keys(store.first_key(), &new, SIZE).into_iter().enumerate() {
        store.enqueue(Kind::Page, key, || page(number));
    }
    store.flush(PATIENCE);
    let bytes = Folder::existing(root)
        .and_then(|folder| folder.totals())
        .expect("a folder")
        .bytes;
    assert_eq!(store.counts().bytes, bytes, "with what was there before");
    assert!(bytes <= 12 * each);
    drop(store);
    let store = open(root, 12 * each, b"model");
    assert_eq!(store.stage(b"", &old, 0, 10).columns(), (0, 3));
    assert_eq!(store.stage(b"", &new, 0, 10).columns(), (0, 8));
}

#[test]
fn temporary_file_of_another_process_with_this_pid_stays() {
    let root = TempDir::new().expect("a folder");
    let theirs = root.path().join(format!("writing-{}-0", std::process::id()));
    fs::write(&theirs, "half a page").expect("a file");
    let folder = Folder::open(root.path(), 1 << 30).expect("a folder");
    let store = open(root.path(), 1 << 30, b"model");
    folder
        .write(Kind::Page, &keys(store.first_key(), &text(SIZE), SIZE)[0], &page(0))
        .expect("a page");
    assert_eq!(fs::read_to_string(theirs).expect("a file"), "half a page");
}

/// Threads write, read and clear one folder: a reader gets the right bytes or nothing.
#[test]
fn concurrent_fill_read_and_clear_return_right_pages_or_none() {
    let root = TempDir::new().expect("a folder");
    let root = root.path();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..20 {
                    filled(root, &text(80));
                }
            });
        }
        scope.spawn(|| {
            let store = open(root, 1 << 30, b"model");
            for _ in 0..200 {
                let staged = store.stage(b"", &text(80), 0, 100);
                assert!((0..staged.columns().1).all(|column| staged.page(column) == Some(&page(column)[..])));
            }
            assert_eq!(store.counts().damaged, 0);
        });
        for _ in 0..40 {
            Folder::open(root, 1)
                .and_then(|folder| folder.clear())
                .expect("a folder");
        }
    });
}

#[test]
fn open_succeeds_while_another_process_removes_folder() {
    let parent = TempDir::new().expect("a folder");
    let (root, opened) = (parent.path().join("cache"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !opened.load(Ordering::Relaxed) {
                let _ = fs::remove_dir(&root);
            }
        });
        let failed: Vec<_> = (0..10_000).filter_map(|_| Folder::open(&root, 1).err()).collect();
        opened.store(true, Ordering::Relaxed);
        assert!(failed.is_empty(), "{} failed, with {:?}", failed.len(), failed[0]);
    });
}

#[test]
fn removed_folder_is_recreated_and_write_error_is_counted() {
    let parent = TempDir::new().expect("a folder");
    let root = parent.path().join("cache");
    let store = open(&root, 1 << 30, b"model");
    fs::remove_dir_all(&root).expect("a folder");
    let all = keys(store.first_key(), &text(8), SIZE);
    store.enqueue(Kind::Page, all[0], || page(0));
    while store.counts().written == 0 {
        std::thread::yield_now();
    }
    assert_eq!(store.stage(b"", &text(8), 0, 2).columns(), (0, 1));
    fs::remove_dir_all(&root).expect("a folder");
    fs::write(&root, "a file").expect("a file");
    store.enqueue(Kind::Page, all[1], || page(1));
    while store.counts().failed == 0 {
        std::thread::yield_now();
    }
    assert!(
        store.take_trouble().is_some() && store.take_trouble().is_none(),
        "it is told once"
    );
    assert_eq!(store.stage(b"", &text(8), 0, 2).columns(), (0, 0));
}

/// A sequence arrives in chunks and single tokens, with a cached page; a draft's own tokens are not reported.
#[test]
fn keeper_stores_pages_that_a_slot_fills() {
    let root = TempDir::new().expect("a folder");
    let store = Arc::new(open(root.path(), 1 << 30, b"model"));
    let mut keeper = Keeper::new(Arc::clone(&store), 2);
    let tokens = text(14);
    let ids: Vec<u32> = (0..20).collect();
    keeper.bind(1, &tokens, b"", None);
    keeper.computed(1, 4, &ids[4..12], page); // page 0 was cached
    keeper.computed(1, 12, &ids[12..14], page);
    for at in 14..17 {
        keeper.computed(1, at, &ids[at..=at], page);
    }
    keeper.bind(0, &tokens, b"other", None);
    keeper.computed(0, 0, &ids[..8], |column| page(7 + column));
    store.flush(PATIENCE);
    let store = open(root.path(), 1 << 30, b"model");
    let there: Vec<bool> = (0..5).map(|column| store.has(&text(20), column)).collect();
    assert_eq!(there, [false, true, true, true, false]);
    let staged = store.stage(b"", &text(20), 1, 3);
    assert!((1..4).all(|column| staged.page(column) == Some(&page(column)[..])));
    let staged = store.stage(b"other", &text(20), 0, 9);
    assert_eq!((staged.columns(), staged.page(1)), ((0, 2), Some(&page(8)[..])));
    assert_eq!(store.stage(b"another", &text(20), 0, 9).columns(), (0, 0));
}

#[test]
fn keys_depend_on_all_previous_tokens() {
    let (one, two) = (first_key(b"a"), first_key(b"b"));
    let of_one = keys(&one, &text(12), SIZE);
    assert_eq!(of_one.len(), 3);
    assert_eq!(keys(&one, &text(11), SIZE), of_one[..2]);
    assert!(of_one.iter().zip(keys(&two, &text(12), SIZE)).all(|(a, b)| *a != b));
    let mut other = text(12);
    other[0] = 9;
    assert!(of_one.iter().zip(keys(&one, &other, SIZE)).all(|(a, b)| *a != b));
    let spaces: [&[u8]; 4] = [b"", b"a", b"b", &[0; 64]];
    let mut all: Vec<_> = spaces.map(|space| first_key_in(&one, space)).into();
    assert_eq!(all[0], one, "everybody's");
    all.push(first_key_in(&two, b"a"));
    all.extend(of_one);
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 8);
}

#[test]
fn cleared_pages_are_written_again_and_staged_pages_are_shared() {
    let root = TempDir::new().expect("a folder");
    let root = root.path();
    let store = open(root, 1 << 30, b"model");
    let all = keys(store.first_key(), &text(12), SIZE);
    let give_all = || {
        for (number, key) in all.iter().enumerate() {
            store.enqueue(Kind::Page, *key, || page(number));
        }
        store.flush(PATIENCE);
    };
    give_all();
    give_all();
    assert_eq!(store.counts().written, 3, "once");
    let staged = store.stage(b"", &text(12), 0, 3);
    Folder::existing(root)
        .and_then(|folder| folder.clear())
        .expect("a folder");
    let again = store.stage(b"", &text(12), 0, 3);
    assert_eq!(
        (staged.columns(), again.columns()),
        ((0, 3), (0, 3)),
        "somebody has them"
    );
    drop((staged, again));
    assert_eq!(store.stage(b"", &text(12), 0, 3).columns(), (0, 0));
    give_all();
    assert_eq!((store.counts().written, files(root).len()), (6, 3));
}

#[test]
fn existing_fails_for_missing_folder() {
    let root = TempDir::new().expect("a folder");
    assert!(Folder::existing(&root.path().join("none")).is_err());
    assert!(!root.path().join("none").exists());
}

#[test]
fn digest_depends_on_all_files_and_their_order() {
    let root = TempDir::new().expect("a folder");
    let file = |name: &str, bytes: &[u8]| {
        let path = root.path().join(name);
        fs::write(&path, bytes).expect("a file");
        path
    };
    let long: Vec<u8> = (0..(9 << 20) + 5).map(|at| (at % 251) as u8).collect();
    let mut other = long.clone();
    *other.last_mut().expect("bytes") ^= 1;
    let (one, two, three) = (file("1", &long), file("2", b"short"), file("3", &other));
    let digest = |files: &[&PathBuf]| {
        let files: Vec<PathBuf> = files.iter().map(|&file| file.clone()).collect();
        digest_of_files(&files).expect("files")
    };
    assert_eq!(digest(&[&one, &two]), digest(&[&one, &two]));
    let all = [
        digest(&[&one, &two]),
        digest(&[&two, &one]),
        digest(&[&three, &two]),
        digest(&[&one]),
    ];
    assert!((0..4).all(|at| !all[..at].contains(&all[at])));
    assert!(digest_of_files(&[root.path().join("none")]).is_err());
}

const STATE: usize = 300;

fn with_states(root: &Path) -> Store {
    open(root, 1 << 30, b"model").with_states(STATE)
}

fn state(number: usize) -> Vec<u8> {
    (0..STATE).map(|at| (at * 17 + number * 3) as u8).collect()
}

/// Writes the pages of a sequence, and states after `behind` many of them.
fn filled_with_states(root: &Path, tokens: &[i32], behind: &[usize]) {
    let store = with_states(root);
    let all = keys(store.first_key(), tokens, SIZE);
    for (number, key) in all.iter().enumerate() {
        store.enqueue(Kind::Page, *key, || page(number));
    }
    for number in behind {
        store.enqueue(Kind::State, all[number - 1], || state(*number));
    }
    store.flush(PATIENCE);
    let counts = store.counts();
    assert_eq!(
        (counts.written, counts.states_written),
        (all.len() as u64, behind.len() as u64)
    );
}

#[test]
fn stage_ends_at_last_page_with_state() {
    let root = TempDir::new().expect("a folder");
    let root = root.path();
    filled_with_states(root, &text(40), &[2, 5, 8]);
    let store = with_states(root);
    let found = |first, most| {
        let staged = store.stage(b"", &text(40), first, most);
        let (from, to) = staged.columns();
        assert!((from..to).all(|column| staged.page(column) == Some(&page(column)[..])));
        assert_eq!(staged.state().map(<[u8]>::to_vec), (to > from).then(|| state(to)));
        (from, to)
    };
    assert_eq!(
        [found(0, 10), found(0, 7), found(3, 2), found(8, 2), found(0, 1)],
        [(0, 8), (0, 5), (3, 5), (8, 8), (0, 0)]
    );
    let counts = store.counts();
    assert_eq!((counts.loaded, counts.states_loaded), (8 + 5 + 2, 3), "what is used");
    let all = keys(store.first_key(), &text(40), SIZE);
    let place = |key: &[u8; 32]| {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        root.join(&name[..2]).join(name)
    };
    fs::remove_file(place(&all[6])).expect("a page");
    assert_eq!(found(0, 10), (0, 5), "up to where all pages are");
    fs::write(place(&all[3]), "no page").expect("a page");
    assert_eq!(found(0, 10), (0, 2));
    assert_eq!(found(4, 3), (4, 5));
    assert_eq!(
        open(root, 1 << 30, b"model").stage(b"", &text(40), 0, 9).columns(),
        (0, 3),
        "of a model without"
    );
}

#[test]
fn damaged_state_is_removed_and_earlier_one_used() {
    let root = TempDir::new().expect("a folder");
    let root = root.path();
    filled_with_states(root, &text(40), &[2, 5, 8]);
    let states: Vec<PathBuf> = files(root)
        .into_iter()
        .filter(|one| one.extension().is_some())
        .collect();
    assert_eq!(states.len(), 3);
    let store = with_states(root);
    let key = keys(store.first_key(), &text(40), SIZE)[7];
    let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    let deepest = root.join(&name[..2]).join(format!("{name}.state"));
    let whole = fs::read(&deepest).expect("a state");
    let page_file = fs::read(deepest.with_extension("")).expect("its page");
    for (number, wrong) in [&whole[..99], &[&whole[..], &[1]].concat(), &page_file, &[0; 364]]
        .iter()
        .enumerate()
    {
        fs::write(&deepest, wrong).expect("a file");
        let staged = store.stage(b"", &text(40), 0, 10);
        assert_eq!((staged.columns(), staged.state()), ((0, 5), Some(&state(5)[..])));
        assert!(!deepest.exists() && store.counts().damaged == number as u64 + 1);
    }
    fs::create_dir(&deepest).expect("a folder in its place");
    assert_eq!(
        store.stage(b"", &text(40), 0, 10).columns(),
        (0, 5),
        "that cannot be removed"
    );
    fs::remove_dir(&deepest).expect("a folder");
    store.enqueue(Kind::State, key, || state(8));
    store.flush(PATIENCE);
    assert_eq!(
        store.stage(b"", &text(40), 0, 10).columns(),
        (0, 8),
        "and it is written again"
    );
    let totals = Folder::existing(root)
        .and_then(|folder| folder.verify())
        .expect("a folder");
    assert_eq!((totals.pages, totals.states, totals.damaged), (10, 3, 0));
    assert_eq!(totals.bytes, 10 * (BYTES as u64 + 72) + 3 * (STATE as u64 + 72));
    let gone = Folder::existing(root)
        .and_then(|folder| folder.clear())
        .expect("a folder");
    assert_eq!((gone.pages, gone.states), (10, 3));
    store.enqueue(Kind::State, key, || state(8));
    store.flush(PATIENCE);
    assert_eq!(store.counts().states_written, 1, "as far as is known it is there");
    assert_eq!(store.stage(b"", &text(40), 0, 10).columns(), (0, 0));
    assert!(
        store.put_state(&text(40), 8, &state(8)[1..]).is_err() && store.put_state(&text(40), 0, &state(8)).is_err()
    );
}

/// Superseded states of a sequence are removed before all else, except those that a second sequence continued from.
#[test]
fn superseded_state_is_removed_first_unless_sequences_branch() {
    let root = TempDir::new().expect("a folder");
    let room = |pages: u64, states: u64| pages * (BYTES as u64 + 72) + states * (STATE as u64 + 72);
    let store = Arc::new(with_states(root.path()));
    let mut keeper = Keeper::new(Arc::clone(&store), 1);
    let ids = |tokens: &[i32]| tokens.iter().map(|id| *id as u32).collect::<Vec<u32>>();
    let (one, mut other) = (text(24), text(24));
    other[8..].fill(99);
    for (turn, from, to) in [(&one, 0, 12), (&one, 12, 24), (&other, 8, 16)] {
        keeper.bind(0, &turn[..to], b"", None);
        keeper.computed(0, from, &ids(&turn[from..to]), page);
        for behind in (from + SIZE..=to).step_by(SIZE) {
            keeper.saved(0, behind, || state(behind / SIZE));
        }
    }
    store.flush(PATIENCE);
    let folder = Folder::open(root.path(), room(8, 3) * 100 / 90 + 100).expect("a folder");
    folder.sweep().expect("a folder");
    let totals = folder.totals().expect("a folder");
    assert_eq!(
        (totals.pages, totals.states),
        (8, 3),
        "those behind 8, 24 and of the other 16"
    );
    let behind = |tokens: &[i32], most| store.stage(b"", tokens, 0, most).columns().1;
    assert_eq!([behind(&one, 6), behind(&one, 5), behind(&other, 6)], [6, 2, 4]);
}

/// A state is written if a step has saved it at the end of a page of a known sequence.
#[test]
fn keeper_stores_states_at_page_ends() {
    let root = TempDir::new().expect("a folder");
    let store = Arc::new(with_states(root.path()));
    let mut keeper = Keeper::new(Arc::clone(&store), 2);
    let ids: Vec<u32> = (0..20).collect();
    keeper.bind(1, &text(14), b"", None);
    keeper.computed(1, 0, &ids[..14], page);
    keeper.saved(1, 8, || state(2));
    keeper.saved(1, 13, || unreachable!("within a page"));
    keeper.saved(1, 0, || unreachable!("before the first"));
    keeper.bind(0, &text(14), b"other", None);
    keeper.computed(0, 0, &ids[..8], page);
    keeper.saved(0, 8, || state(5));
    store.flush(PATIENCE);
    let staged = Arc::new(store.stage(b"", &text(20), 0, 3));
    assert_eq!((staged.columns(), staged.state()), ((0, 2), Some(&state(2)[..])));
    let of_other = store.stage(b"other", &text(20), 0, 3);
    assert_eq!((of_other.columns(), of_other.state()), ((0, 2), Some(&state(5)[..])));
    keeper.bind(0, &text(14), b"", Some(staged));
    assert_eq!(
        (keeper.staged_state(0), keeper.staged_state(1)),
        (Some(&state(2)[..]), None)
    );
    keeper.computed(0, 8, &ids[8..14], page);
    assert_eq!(keeper.staged_state(0), None, "it has begun");
}
