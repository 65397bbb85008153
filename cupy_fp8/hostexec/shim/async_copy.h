// Asynchronous copies, called in the host branches of PTX wrappers.
//
// A copy lands as late as the program allows: cp.async at the wait that covers its group, a bulk load when a
// thread waits for its mbarrier and every arrival is in, a bulk store (which reads shared memory) at the wait
// for its group. So a missing wait shows as wrong bytes or as an error. With order="desc" loads land at once
// instead, which shows a buffer refilled while others read it. An st.async lands at once.
//
// `shared` and `bar` may belong to another block of the cluster.
//
//   host_cp_async(shared, global, bytes, source_bytes)     cp.async: 4, 8 or 16 bytes, the rest after
//                                                          source_bytes zeroed
//   host_cp_async_commit()                                 cp.async.commit_group
//   host_cp_async_wait(n)                                  cp.async.wait_group n
//   host_cp_async_wait_all()                               cp.async.wait_all
//   host_mbarrier_init(bar, arrivals)                      mbarrier.init
//   host_mbarrier_arrive(bar, 0)                           mbarrier.arrive
//   host_mbarrier_arrive(bar, bytes)                       mbarrier.arrive.expect_tx
//   host_mbarrier_complete_tx(bar, bytes)                  mbarrier.complete_tx
//   host_mbarrier_try_wait(bar, parity)                    mbarrier.try_wait.parity (yields when it is 0)
//   host_bulk_load(shared, global, bytes, bar)             cp.async.bulk.shared.global with complete_tx
//   host_bulk_load_row(shared, global, bytes, source_bytes, swizzle, bar)
//                                          a row of cp.async.bulk.tensor: the rest after source_bytes is
//                                          zeroed; 16-byte chunk c lands at c ^ swizzle
//   host_store_async(shared, value, bar)                   st.async of 4 bytes with complete_tx
//   host_bulk_store(global, shared, bytes)                 cp.async.bulk.global.shared.bulk_group
//   host_bulk_add_f32(global, shared, bytes)               cp.reduce.async.bulk with .add.f32
//   host_bulk_commit(), host_bulk_wait(n)                  cp.async.bulk.commit_group, .wait_group[.read] n
#pragma once

// The kernel itself stores, so that the sanitizers see it.
HOST_INLINE void host_store_async(int* shared, int value, void* barrier) {
    *shared = value;
    host_mbarrier_complete_tx(barrier, sizeof(int));
}
HOST_INLINE void host_cp_async_wait_all() { host_cp_async_wait(0xffffffffu); }
