"""Which call form of which program is shown to work, or to be refused, by which tests."""

from __future__ import annotations

from typing import NamedTuple

WORKS = "works"


class Form(NamedTuple):
    client: str
    form: str
    outcome: str
    """WORKS, or what is raised and why."""
    tests: str
    """In `tests/clients`: file without `test_` and `.py`, `::`, name without `test_`; several with spaces."""

    @property
    def test_ids(self) -> list[str]:
        pairs = (test.split("::") for test in self.tests.split())
        return [f"tests/clients/test_{file}.py::test_{name}" for file, name in pairs]


LENIENT = "`ValueError` with both row counts; works with `MORI_EP_LENIENT_INDICES=1`"

FORMS: tuple[Form, ...] = (
    Form(
        "vLLM, older",
        "all by keyword; the sender's `topk_weights` in `combine`",
        WORKS,
        "vllm::forms_and_payloads vllm::weights_of_the_sender_in_combine",
    ),
    Form("vLLM", "`dispatch(x, w, scale, ids)`, `combine(x, None, ids)[0][:n]`", WORKS, "vllm::forms_and_payloads"),
    Form(
        "vLLM",
        "InterNodeV1, InterNodeV1LL with `gpu_per_node = min(8, world)`",
        WORKS,
        "vllm::kernel_types_of_several_nodes_on_one",
    ),
    Form("vLLM, HT", "whole views and the count go to the expert kernel", WORKS, "vllm::outputs_have_fixed_addresses"),
    Form(
        "vLLM, LL",
        "an AsyncLL op per micro-batch; `op.dispatch_recv`, `op.combine_recv` as hooks; remapped ids",
        WORKS,
        "vllm::halves_of_two_micro_batches_overlap",
    ),
    Form(
        "SGLang",
        "fields filtered by the dataclass; `kernel_type is AsyncLL`; `call_local_expert_count`",
        WORKS,
        "sglang::dispatch_record_and_combine",
    ),
    Form(
        "SGLang",
        "the flag given to `dispatch_send` only: counts are there after `dispatch_recv`",
        WORKS,
        "sglang::the_flag_of_the_send_half_is_honoured_when_rows_arrive",
    ),
    Form("SGLang", "`quant_type` of each kind", WORKS, "sglang::quantised_combine"),
    Form("SGLang", "`max_total_recv_tokens` below W x M", WORKS, "sglang::a_receive_cap"),
    Form("SGLang", "up to four ops per process", WORKS, "sglang::four_ops_in_turn"),
    Form(
        "AITER",
        "construction for one and for several nodes",
        WORKS,
        "aiter::construction_for_one_node aiter::construction_for_several_nodes",
    ),
    Form("AITER, older", "no `gpu_per_node`, up to 8 ranks", WORKS, "aiter::an_older_revision_without_gpu_per_node"),
    Form(
        "AITER, older",
        "no `gpu_per_node`, more ranks, of which 8 is no divisor",
        "`ValueError` at construction with both numbers: only the caller knows its nodes",
        "aiter::an_older_revision_is_refused_where_8_does_not_divide_the_world",
    ),
    Form(
        "AITER, its multi-GPU test",
        "`dispatch` with three arguments, four results",
        "`TypeError`; no recent release has that signature",
        "aiter::its_stale_test_is_refused",
    ),
    Form(
        "ATOM",
        "launch sizes as fifth and sixth argument: the sixth is `rdma_block_num`, warps stay the config's",
        WORKS,
        "atom::launch_sizes_by_position atom::launch_sizes_by_position_in_auto_mode",
    ),
    Form("ATOM", "two micro-batches in turn on one AsyncLL op", WORKS, "atom::micro_batches_that_take_turns_on_one_op"),
    Form(
        "ATOM",
        "two micro-batches in flight on one AsyncLL op",
        "`RuntimeError` that names the missing half: one op has one call in flight, make an op per micro-batch",
        "atom::two_micro_batches_in_flight_on_one_op_are_refused",
    ),
    Form(
        "Primus-Turbo",
        "autograd functions, `scale_dim=0`, `scale_type_size=0`, queue pairs from its environment",
        WORKS,
        "primus_turbo::autograd_with_the_ids_of_the_sender primus_turbo::queue_pairs_from_its_environment",
    ),
    Form(
        "Primus-Turbo",
        "received ids in `combine`",
        LENIENT,
        "primus_turbo::received_ids_are_refused_by_default primus_turbo::received_ids_in_lenient_mode",
    ),
    Form(
        "Megatron-LM fork",
        "`return_routing=True`, `routing=` in backward and in `combine`, handles rebuilt from saved tensors, `reset()`",
        WORKS,
        "megatron::training_with_handles megatron::six_values_and_what_a_handle_refuses",
    ),
    Form(
        "Megatron-LM fork",
        "handles with other kernel types",
        "`NotImplementedError`",
        "megatron::handles_are_refused_where_no_client_uses_them",
    ),
    Form(
        "Megatron-LM fork, older",
        "received ids in `combine`",
        LENIENT,
        "megatron::received_ids_of_the_older_revision_are_refused primus_turbo::received_ids_in_lenient_mode",
    ),
    Form(
        "DeepEP-style wrappers",
        "`dispatch_standard_moe`, `combine_standard_moe` by keyword with launch sizes",
        WORKS,
        "deepep::packed_dispatch_and_combine",
    ),
    Form(
        "DeepEP-style wrappers",
        "`convert_dispatch_output`, `convert_combine_input` around `dispatch` and a zero-copy `combine`",
        WORKS,
        "deepep::conversions_around_a_plain_dispatch_and_combine",
    ),
    Form("DeepEP-style wrappers", "`weights=None`, `scales=None`", WORKS, "deepep::dispatch_without_weights"),
    Form(
        "DeepEP-style wrappers",
        "packed calls with other kernel types; in a build without them",
        "`ValueError`; `RuntimeError` that names `ENABLE_STANDARD_MOE_ADAPT`",
        "deepep::packed_calls_are_refused_for_other_kernel_types deepep::packed_calls_of_a_build_without_them",
    ),
    Form(
        "cross-library benchmark",
        'attributes of op and config, `shmem_num_qp_per_pe()`, `launch_config_mode == "MANUAL"`',
        WORKS,
        "benchmarks::what_the_benchmark_reads",
    ),
    Form(
        "cross-library benchmark",
        "`get_registered_combine_input_buffer(dtype, hidden_dim=h)`",
        WORKS,
        "benchmarks::the_registered_buffer_for_any_row_size",
    ),
    Form(
        "cross-library benchmark",
        "`dispatch_recv(warp_per_block=)`",
        WORKS,
        "benchmarks::launch_sizes_of_the_receive_halves",
    ),
    Form(
        "cross-library benchmark",
        "returned ids in `combine`",
        LENIENT,
        "benchmarks::returned_ids_are_refused_by_default benchmarks::returned_ids_in_lenient_mode",
    ),
    Form(
        "RTP-LLM, vLLM fork",
        "work buffers of `max_num_tokens_to_recv()` rows",
        WORKS,
        "benchmarks::work_buffers_sized_by_the_receive_cap",
    ),
    Form(
        "all",
        'groups registered as "mori" or "mori_ep", by every layer, or under torch\'s name; `shmem_finalize()` at exit',
        WORKS,
        "groups::groups_by_name",
    ),
    Form("all", "imports", WORKS, "import_surface::name import_surface::what_is_out_of_scope_says_so"),
)


def markdown() -> str:
    """The table of docs/clients.md."""
    lines = ["| program | form | here | tests, in `tests/clients` |", "|---|---|---|---|"]
    for form in FORMS:
        tests = ", ".join(f"`{test_id.removeprefix('tests/clients/')}`" for test_id in form.test_ids)
        lines.append(f"| {form.client} | {form.form} | {form.outcome} | {tests} |")
    return "\n".join(lines)
