"""Keys, values and state of one sequence as bytes outside of the device.

Owns: what the bytes mean (`layout`), the copies between device pages and host memory (`pages`), and the record that goes with them when
one engine hands a sequence to another (`handover`); slices of states that
outlive their sequences (`state_slices`). Never touches: how bytes travel, which sequence is meant, the scheduler.
"""
