//! The store as an engine and a person see it, with what disks and other processes do to it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use minisgl_store::{Folder, Keeper, Store, digest_of_files, first_key, keys};
use tempfile::TempDir;

const SIZE: usize = 4;
const BYTES: usize = 1000;

fn page(number: usize) -> Vec<u8> {
    (0..BYTES).map(|at| (at * 31 + number * 7) as u8).collect()
}

fn text(length: usize) -> Vec<i32> {
    (0..length as i32).collect()
}

fn open(root: &Path, limit: u64, identity: &[u8]) -> Store {
    Store::open(root, limit, identity, SIZE, BYTES).expect("a folder")
}

/// The pages of a text, written.
fn filled(root: &Path, tokens: &[i32]) {
    let store = open(root, 1 << 30, b"model");
    for (number, key) in keys(store.first_key(), tokens, SIZE).into_iter().enumerate() {
        store.give(key, || page(number));
    }
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
fn what_one_process_computed_another_reads() {
    let root = TempDir::new().expect("a folder");
    let root = root.path().join("made/here");
    filled(&root, &text(22));
    let store = open(&root, 1 << 30, b"model");
    let staged = store.stage(&text(40), 0, 100);
    assert_eq!(staged.columns(), (0, 5), "whole pages");
    assert!((0..5).all(|column| staged.page(column) == Some(&page(column)[..])));
    let staged = store.stage(&text(40), 2, 2);
    assert_eq!((staged.columns(), staged.page(1), staged.page(4)), ((2, 4), None, None));
    assert_eq!(staged.page(3), Some(&page(3)[..]));
    assert_eq!(store.counts().loaded, 7);
    assert!(store.has(&text(22), 4) && !store.has(&text(22), 5));
    let mut other = text(40);
    other[9] = 77;
    assert_eq!(store.stage(&other, 0, 100).columns(), (0, 2), "all tokens before count");
    let other = open(&root, 1 << 30, b"another model");
    assert_eq!(other.stage(&text(40), 0, 100).columns(), (0, 0));
}

#[test]
fn only_the_owner_reads_any_of_it() {
    let parent = TempDir::new().expect("a folder");
    let root = parent.path().join("cache");
    filled(&root, &text(8));
    let mode = |path: &Path| fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
    assert_eq!(mode(&root), 0o700);
    for file in files(&root) {
        assert_eq!((mode(&file), mode(file.parent().expect("a folder"))), (0o600, 0o700));
    }
}

/// Every byte of a file, each length, and each file in the place of another.
#[test]
fn a_damaged_page_is_no_page_and_goes() {
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
        let staged = store.stage(&tokens, 0, 3);
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
    assert_eq!(store.stage(&tokens, 0, 3).columns(), (0, 3), "and whole again");
    fs::write(&all[0].0, "no page").expect("a file");
    let totals = Folder::open(root, 1)
        .and_then(|folder| folder.verify())
        .expect("a folder");
    assert_eq!((totals.pages, totals.damaged), (2, 1));
    assert!(!all[0].0.exists());
}

#[test]
fn what_was_not_used_for_longest_goes_first() {
    let root = TempDir::new().expect("a folder");
    let root = root.path();
    let (old, new) = (text(40), vec![5; 32]);
    filled(root, &old);
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(1000);
    for file in files(root) {
        fs::File::open(file)
            .and_then(|file| file.set_modified(long_ago))
            .expect("a file");
    }
    let each = fs::metadata(&files(root)[0]).expect("a file").len();
    let store = open(root, 12 * each, b"model");
    assert_eq!(store.stage(&old, 0, 3).columns(), (0, 3), "they are used");
    for (number, key) in keys(store.first_key(), &new, SIZE).into_iter().enumerate() {
        store.give(key, || page(number));
    }
    drop(store);
    let store = open(root, 12 * each, b"model");
    assert!(store.counts().bytes <= 12 * each);
    assert_eq!(store.stage(&old, 0, 10).columns(), (0, 3));
    assert_eq!(store.stage(&new, 0, 10).columns(), (0, 8));
}

/// Many write, read and clear one folder: whoever reads gets what is right or nothing.
#[test]
fn threads_race_to_fill_read_and_clear_it() {
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
                let staged = store.stage(&text(80), 0, 100);
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
fn a_folder_that_goes_comes_back_and_one_that_cannot_be_written_is_a_counter() {
    let parent = TempDir::new().expect("a folder");
    let root = parent.path().join("cache");
    let store = open(&root, 1 << 30, b"model");
    fs::remove_dir_all(&root).expect("a folder");
    let all = keys(store.first_key(), &text(8), SIZE);
    store.give(all[0], || page(0));
    while store.counts().written == 0 {
        std::thread::yield_now();
    }
    assert_eq!(store.stage(&text(8), 0, 2).columns(), (0, 1));
    fs::remove_dir_all(&root).expect("a folder");
    fs::write(&root, "a file").expect("a file");
    store.give(all[1], || page(1));
    while store.counts().failed == 0 {
        std::thread::yield_now();
    }
    assert_eq!(store.stage(&text(8), 0, 2).columns(), (0, 0));
}

/// A text in chunks and tokens, with a page found elsewhere; a draft's row is not told of.
#[test]
fn a_slot_gives_away_what_it_filled() {
    let root = TempDir::new().expect("a folder");
    let store = Arc::new(open(root.path(), 1 << 30, b"model"));
    let mut keeper = Keeper::new(Arc::clone(&store), 2);
    let tokens = text(14);
    let ids: Vec<u32> = (0..20).collect();
    keeper.bind(1, &tokens, true, None);
    keeper.computed(1, 4, &ids[4..12], page); // page 0 was found in the tree
    keeper.computed(1, 12, &ids[12..14], page);
    for at in 14..17 {
        keeper.computed(1, at, &ids[at..=at], page);
    }
    keeper.bind(0, &tokens, false, None);
    keeper.computed(0, 0, &ids[..8], |_| unreachable!("not the store's kind"));
    drop(keeper);
    drop(Arc::into_inner(store));
    let store = open(root.path(), 1 << 30, b"model");
    let there: Vec<bool> = (0..5).map(|column| store.has(&text(20), column)).collect();
    assert_eq!(there, [false, true, true, true, false]);
    let staged = store.stage(&text(20), 1, 3);
    assert!((1..4).all(|column| staged.page(column) == Some(&page(column)[..])));
}

#[test]
fn keys_depend_on_all_that_is_before() {
    let (one, two) = (first_key(b"a"), first_key(b"b"));
    let of_one = keys(&one, &text(12), SIZE);
    assert_eq!(of_one.len(), 3);
    assert_eq!(keys(&one, &text(11), SIZE), of_one[..2]);
    assert!(of_one.iter().zip(keys(&two, &text(12), SIZE)).all(|(a, b)| *a != b));
    let mut other = text(12);
    other[0] = 9;
    assert!(of_one.iter().zip(keys(&one, &other, SIZE)).all(|(a, b)| *a != b));
}

#[test]
fn what_was_cleared_is_given_again_and_what_two_have_at_hand_is_read_once() {
    let root = TempDir::new().expect("a folder");
    let root = root.path();
    let store = open(root, 1 << 30, b"model");
    let all = keys(store.first_key(), &text(12), SIZE);
    let give_all = || {
        for (number, key) in all.iter().enumerate() {
            store.give(*key, || page(number));
        }
        store.flush(Duration::from_secs(60));
    };
    give_all();
    give_all();
    assert_eq!(store.counts().written, 3, "once");
    let staged = store.stage(&text(12), 0, 3);
    Folder::existing(root)
        .and_then(|folder| folder.clear())
        .expect("a folder");
    let again = store.stage(&text(12), 0, 3);
    assert_eq!(
        (staged.columns(), again.columns()),
        ((0, 3), (0, 3)),
        "somebody has them"
    );
    drop((staged, again));
    assert_eq!(store.stage(&text(12), 0, 3).columns(), (0, 0));
    give_all();
    assert_eq!((store.counts().written, files(root).len()), (6, 3));
}

#[test]
fn who_can_read_no_folder_is_told() {
    let root = TempDir::new().expect("a folder");
    assert!(Folder::existing(&root.path().join("none")).is_err());
    assert!(!root.path().join("none").exists());
}

#[test]
fn a_digest_is_that_of_all_files_in_their_order() {
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
