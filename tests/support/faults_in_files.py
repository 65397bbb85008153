"""Faults to plant in the modules of cupy_fp8/io, each with the test that finds it (mutations.py)."""

from faults import Fault

FORMS, CLAIM, REPORT = (f"tests/io/test_{name}.py" for name in ("forms_of_scales", "claim", "convert_report"))
NAMES, CONFIGS, SAVING = (f"tests/io/test_{name}.py" for name in ("names_of_scales", "configs", "saving"))
FILES, BROKEN, REPLACE = (
    f"tests/io/test_{name}.py" for name in ("safetensors", "checkpoint_faults", "replace")
)

FILE_FAULTS = (
    Fault(
        "io/archive.py",
        "if info.file_size > most * end:",
        "if False:",
        test="tests/io/test_archive_damage.py",
    ),
    Fault(
        "io/archive.py",
        "size != info.file_size - file.tell():",
        "False:",
        name="arrays of other sizes",
        test="tests/io/test_archive_damage.py",
    ),
    Fault(
        "io/checkpoint.py",
        "if self.shard.get(tensor) != shard:",
        "if False:",
        test=f"{FILES}::test_an_index_that_does_not_fit",
    ),
    Fault(
        "io/chunks.py",
        "scales[rows.start // down:-(-rows.stop // down)]",
        "scales[:-(-(rows.stop - rows.start) // down)]",
        test=f"{FORMS}::test_more_than_one_chunk",
        name="scales of the first chunk",
    ),
    Fault(
        "io/chunks.py",
        "at = line * self.stored.scale[2][-1]",
        "at = 0 * self.stored.scale[2][-1]",
        test=f"{FORMS}::test_more_than_one_chunk",
        name="scales written at the start",
    ),
    Fault(
        "io/chunks.py",
        "start = (rows.matrix * height + rows.start) * width",
        "start = rows.start * width",
        test=f"{FORMS}::test_more_than_one_chunk",
        name="rows of the first matrix",
    ),
    Fault(
        "io/chunks.py",
        "self.out.put(self.name, self.start,",
        "self.out.put(self.name, 0,",
        test=f"{REPORT}::test_tensors_that_stay_are_copied_whole",
        name="copies to the start",
    ),
    Fault(
        "io/chunks.py",
        "return (block[0] or 1) if block else 1",
        "return 1",
        test=f"{FORMS}::test_more_than_one_chunk",
        name="blocks divided by chunks",
    ),
    Fault(
        "io/claim.py", "if found == what:", "if found:", test=f"{CLAIM}::test_another_process_holds_the_place"
    ),
    Fault(
        "io/claim.py",
        "if not _is_at(path, descriptor) or",
        "if",
        name="a lost claim",
        test=f"{CLAIM}::test_a_claim_that_is_taken_away",
    ),
    Fault(
        "io/convert.py",
        "nbytes, COPY_BYTES):",
        "nbytes, 1 << 60):",
        name="the first piece alone",
        test=f"{REPORT}::test_tensors_that_stay_are_copied_whole",
    ),
    Fault(
        "io/convert.py",
        "s.include, s.exclude, s.scales, str(s.block)]",
        "s.exclude, s.scales, str(s.block)]",
        test=f"{CLAIM}::test_every_setting_counts",
        name="include in no fingerprint",
    ),
    Fault(
        "io/convert.py",
        "s.include, s.exclude, s.scales, str(s.block)]",
        "s.include, s.exclude, s.scales]",
        test=f"{CLAIM}::test_every_setting_counts",
        name="block in no fingerprint",
    ),
    Fault(
        "io/convert.py",
        "s.include, s.exclude, s.scales, str(s.block)]",
        "s.include, s.scales, str(s.block)]",
        test=f"{CLAIM}::test_every_setting_counts",
        name="exclude in no fingerprint",
    ),
    Fault(
        "io/convert.py",
        "if not target.exists() or _fingerprint_of(target) != self._fingerprint(shard):",
        "if not target.exists():",
        test=f"{CLAIM}::test_a_shard_that_was_exchanged_meanwhile",
        name="foreign shards at the end",
    ),
    Fault(
        "io/convert.py",
        "if target.exists() and self._fingerprint(shard) != _fingerprint_of(target):",
        "if False:",
        test=f"{CLAIM}::test_a_shard_of_another_part_and_other_settings",
        name="foreign shards",
    ),
    Fault(
        "io/convert.py",
        "not source.keeps_scale(one.stored.dtype)",
        "source.unit == 0",
        name="a scale a chunk",
        test=f"{BROKEN}::test_one_scale_of_a_tensor_of_several_chunks",
    ),
    Fault(
        "io/found.py",
        "if name in pairing.packed:",
        "if False:",
        test="tests/io/test_packed_layers.py::test_packed_layers_are_not_drawn",
    ),
    Fault(
        "io/layer_patterns.py",
        r're.search(r"\)\s*[*+{]", text) or',
        "",
        test=f"{CONFIGS}::test_hostile_lists",
    ),
    Fault(
        "io/leftovers.py",
        "and name not in pairing.scales and",
        "and",
        test="tests/io/test_leftovers.py::test_scales_of_activations_go_with_their_weights",
    ),
    Fault(
        "io/loading.py",
        "for name in wanted:\n        if reason",
        "for name in wanted[:1]:\n        if reason",
        test="tests/io/test_odd_tensors.py::test_one_error_names_them_all",
    ),
    Fault(
        "io/matrices.py", "found.values.ndim == 2", "found.values.ndim >= 2", test="tests/io/test_matrices.py"
    ),
    Fault(
        "io/pairing.py",
        'and _OTHER_WORDS.isdisjoint(last.split("_"))',
        "",
        test=f"{BROKEN}::test_vectors_that_are_no_scales_are_not_advised",
    ),
    Fault(
        "io/pairing.py",
        "elif given == NONE:",
        "elif True:",
        name="codes taken as numbers",
        test=f"{NAMES}::test_codes_without_scales_are_refused",
    ),
    Fault(
        "io/planning.py",
        "if untold and found is not None:",
        "if False:",
        test=f"{BROKEN}::test_a_block_of_the_users_is_told_of_what_stays",
    ),
    Fault(
        "io/quantization_config.py",
        "return own[0], own[1]",
        "return own[1], own[0]",
        test=f"{CONFIGS}::test_a_block_that_is_no_square_is_told",
    ),
    Fault(
        "io/replace.py",
        "        check()\n",
        "",
        test=f"{CLAIM}::test_a_claim_that_is_lost_is_noticed_before_a_rename",
    ),
    Fault(
        "io/replace.py",
        "os.fsync(file.fileno())",
        "pass",
        name="fsync",
        test=f"{SAVING}::test_a_folder_is_replaced_as_a_whole_or_not_at_all",
    ),
    Fault("io/replace.py", "if _lock(file):\n", "if True:\n", name="files of living writers", test=REPLACE),
    Fault(
        "io/safetensors.py",
        "if length > min(size - 8, _LONGEST_HEADER):",
        "if length > size - 8:",
        test=f"{FILES}::test_headers_longer_than_any",
    ),
    Fault(
        "io/safetensors.py",
        "if len(found) != count:",
        "if False:",
        name="short reads",
        test=f"{FILES}::test_a_file_that_is_cut_off_while_it_is_read",
    ),
    Fault(
        "io/saving.py",
        "if size and size + own > most:",
        "if size + own > 2 * most:",
        test=f"{SAVING}::test_shards_and_index",
    ),
    Fault(
        "io/scale_forms.py",
        "scale = scale.view(float8_e8m0fnu)\n    return",
        "scale = scale.astype(float32)\n    return",
        test=f"{FORMS}::test_swizzled_scales",
    ),
    Fault(
        "io/scale_forms.py",
        "return Form(fits[0])",
        "return Form(fits[-1])",
        test=f"{FORMS}::test_a_marker_that_is_none",
        name="the last block that fits",
    ),
    Fault(
        "io/scale_forms.py",
        "starts // (coarse or max(n, 1))",
        "starts // (fine or max(n, 1))",
        test=f"{FORMS}::test_any_block",
        name="scales that do not repeat",
    ),
    Fault(
        "io/staying.py",
        'return "one wide" if 1 in shape[-2:] else ""',
        'return ""',
        test="tests/io/test_staying.py::test_what_stays",
    ),
    Fault("io/summary.py", "float(finite.min())", "float(finite.max())", test="tests/tools/test_inspect.py"),
    Fault(
        "io/weights.py",
        "before, difference = (xp.where(finite, a, 0)",
        "before, difference = (a",
        test=f"{REPORT}::test_values_that_are_not_finite_are_left_out",
    ),
    Fault(
        "io/weights.py",
        "if source.block == stored.block and",
        "if",
        name="data kept with other scales",
        test="tests/io/test_convert.py::test_between_formats",
    ),
    Fault(
        "io/written_config.py",
        "if form.share is None or form.share == _ROWS:",
        "if form.share is None:",
        test=f"{SAVING}::test_what_config_json_says",
    ),
)
