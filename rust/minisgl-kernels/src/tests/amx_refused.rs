//! Test in a process that the system does not permit to use tiles; a process of its own, as permission is requested
//! once.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use crate::kernels::Isa;

/// Runs `then` while a thread has a signal stack too small for tile state, for which the system refuses tiles.
fn with_small_signal_stack(then: impl FnOnce()) {
    let size = libc::MINSIGSTKSZ.max(4096) + 2048;
    let mut memory = vec![0u8; size];
    let stack = libc::stack_t {
        ss_sp: memory.as_mut_ptr().cast(),
        ss_flags: 0,
        ss_size: size,
    };
    // SAFETY: an address, flags and a size: zeros are valid.
    let mut before: libc::stack_t = unsafe { std::mem::zeroed() };
    // SAFETY: the memory lives until the stack before it is back; no signal comes in a test.
    if unsafe { libc::sigaltstack(&stack, &mut before) } == 0 {
        then();
        // SAFETY: the value that the system had.
        let back = unsafe { libc::sigaltstack(&before, std::ptr::null_mut()) };
        assert_eq!(back, 0);
    }
}

#[test]
fn tiles_need_the_systems_permission() {
    if std::env::var_os("MINISGL_TEST_ALONE").is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "tests::amx_refused::tiles_need_the_systems_permission"]);
        let output = child.env("MINISGL_TEST_ALONE", "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    with_small_signal_stack(|| {
        let best = Isa::detect(None).expect("there is always one");
        assert_ne!(best, Isa::Amx);
        let text = Isa::detect(Some("amx")).expect_err("no leave").to_string();
        assert!(text.contains("amx"), "{text}");
    });
}
