"""Mistakes in the names of pages beyond the pool, and in the store that keeps them on a disk."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "keys-forget-what-came-before",
        "chain_keys",
        "hashlib.blake2b(before + page,",
        "hashlib.blake2b(page,",
        ("test_a_key_names_the_tokens_from_the_beginning",),
        "a key names all tokens up to its page's end",
    ),
    Mutation(
        "keys-count-no-drop",
        "PageKeys.dropped",
        "self.counters[page_id] += 1",
        "pass",
        ("test_a_counter_grows_when_its_page_leaves_the_tree_and_only_then",),
        "a copy of a page that left the tree is given up",
    ),
    Mutation(
        "slabs-ask-before-they-read",
        "SlottedStore.put",
        "            check = self._slots.write(slot, page)\n            if not is_valid():",
        "            if not (is_valid() and (check := self._slots.write(slot, page))):",
        ("test_a_page_is_found_only_if_it_was_valid_once_it_was_written",),
        "a page that changed while it was copied is given up",
    ),
    Mutation(
        "slabs-trust-what-they-read",
        "SlottedStore.get",
        "self._slots.read(slot, into) == check",
        "self._slots.read(slot, into) is not None",
        ("test_a_damaged_page_is_found_out_and_forgotten",),
        "a damaged page is never served",
    ),
    Mutation(
        "slabs-trust-entries",
        "SlabFiles._sound_entries",
        "if check == _checksum(head):",
        "if record != _VOID:",
        ("test_a_damaged_entry_is_lost_with_a_warning",),
        "a damaged entry names no page",
    ),
    Mutation(
        "slabs-void-nothing",
        "SlottedStore._forget",
        "self._slots.void(self._drop(key))",
        "self._drop(key)",
        ("test_wherever_writing_ends_no_page_is_wrong_and_one_is_lost",),
        "no entry names a slot that is being overwritten",
    ),
    Mutation(
        "slabs-remove-folders-in-use",
        "StoreFolder._others",
        "_is_held(each) == held",
        "not held",
        ("test_stores_that_are_held_share_the_size",),
        "no process loses the folder that it works in",
    ),
    Mutation(
        "slabs-outgrow-the-size",
        "SlabFiles.allocate",
        "if not self._folder.make_room(wanted - size):",
        "if not self._folder.make_room(0):",
        ("test_stores_that_are_held_share_the_size",),
        "one size bounds all folders together",
    ),
)
