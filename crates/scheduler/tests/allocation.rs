//! A steady step allocates nothing.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{Memory, config, prompt};
use deepinfer_scheduler::{Prepared, Scheduler, StepId};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|c| c.set(c.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.with(|c| c.set(c.get() + 1));
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn step(scheduler: &mut Scheduler, memory: &mut Memory, seqs: usize, accepted: i32) {
    let plan = scheduler.schedule(1).unwrap().unwrap();
    memory.get_mut(plan.slot, "accepted")[..seqs].fill(accepted);
    memory.get_mut(plan.slot, "tokens").fill(3);
    assert_eq!(scheduler.complete(plan.step, 1).unwrap().len(), seqs);
}

#[test]
fn steady_decode_allocates_nothing_while_blocks_fill_and_publish() {
    for draft in [0, 3] {
        let mut c = config(16, 4000, 32, 4096);
        c.limits.max_model_len = 2048;
        c.limits.max_draft = draft;
        let mut scheduler = Scheduler::new(&c).unwrap();
        let mut memory = Memory::new(&scheduler, 3);
        // SAFETY: the memory outlives the scheduler and is touched between calls only.
        unsafe { scheduler.register_ring(&memory.views()).unwrap() };
        let inbox = scheduler.inbox();
        let seqs: Vec<_> =
            (0..32).map(|i| inbox.add(&Prepared::new(prompt(i % 2, 30 + i as u32), 1500)).unwrap()[0]).collect();
        for _ in 0..40 {
            step(&mut scheduler, &mut memory, 32, 1);
        }
        let before = COUNT.with(Cell::get);
        for _ in 0..300 {
            for &seq in &seqs {
                if draft > 0 {
                    assert!(scheduler.propose(seq, &[3, 3, 4]).unwrap());
                }
            }
            step(&mut scheduler, &mut memory, 32, if draft > 0 { 2 } else { 1 });
            let newest = scheduler.snapshot().last_step;
            assert!(scheduler.note_step_times(StepId(newest), 1000, 10, 100));
        }
        assert_eq!(COUNT.with(Cell::get) - before, 0, "{draft} drafts");
        assert!(scheduler.snapshot().output_tokens > 9000);
        assert!(scheduler.counts().groups[0].held > 32 * 19);
    }
}
