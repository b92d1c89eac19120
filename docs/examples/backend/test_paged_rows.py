def test_no_host_sync(async_spec_backend):
    assert async_spec_backend.passed, async_spec_backend.explain()


def test_a_bound_is_all_that_the_host_is_asked_for(async_spec_backend):
    assert str(async_spec_backend.need) == "upper bound"
