# A request costs its input, its output, and the time for which it holds the KV cache.
#
# In each step a request holds its input, and the output of the steps before. Over all steps it
# holds input * output + output^2 / 2 token-steps. Counts alone give what each report adds, and the
# sum over all reports is the formula of the last one. Sequences of one request share its output,
# and run side by side.

cdef int64_t KV_STEPS_MAX = <int64_t>1 << 62
# Times 1000 it still fits, which division by a weight in thousandths needs.
cdef int64_t PRICED_MAX = 9_223_372_036_854_775
# A counter has room for it beside VTC_MAX.
cdef int64_t CHARGE_MAX = <int64_t>3 << 60


cdef inline int64_t kv_steps(
    const Request* r, int64_t input_tokens, int64_t output_tokens
) noexcept nogil:
    """Return the token-steps for which a request has held the KV cache, at most KV_STEPS_MAX.
    O(1)."""
    cdef int64_t doubled = 2 * input_tokens * r.n + output_tokens
    cdef wide held
    if output_tokens == 0:
        return 0
    held = <wide>doubled * output_tokens
    if held < KV_STEPS_MAX:  # This division is much cheaper.
        return <int64_t>held // (2 * r.sequences)
    return <int64_t>min(held // (2 * r.sequences), <wide>KV_STEPS_MAX)


cdef inline int64_t price_of(
    const Settings* s, const Request* r, int64_t input_tokens, int64_t cached_tokens,
    int64_t output_tokens,
) noexcept nogil:
    """Return what a request costs with these totals, at weight 1, at most PRICED_MAX. O(1)."""
    cdef int64_t micro = (
        (input_tokens - cached_tokens) * s.input_price_micro
        + cached_tokens * (s.input_price_micro * s.cached_price_ppm // 1_000_000)
        + output_tokens * s.output_price_micro
    )
    if s.kv_price_micro == 0:
        return micro
    return <int64_t>min(
        micro + <wide>kv_steps(r, input_tokens, output_tokens) * s.kv_price_micro,
        <wide>PRICED_MAX,
    )


cdef inline int64_t weighted_by(int64_t micro, int64_t weight_milli) noexcept nogil:
    """Return a cost over a weight, at most CHARGE_MAX. O(1)."""
    return min(micro * 1000 // weight_milli, CHARGE_MAX)
