def test_no_host_sync(async_spec_backend):
    assert async_spec_backend.passed, async_spec_backend.explain()


def test_device_lengths_are_all_it_needs(async_spec_backend):
    assert str(async_spec_backend.need) == "none"


def test_its_forward_attends_to_each_batch_of_a_step(async_spec_backend):
    assert async_spec_backend.not_attended is None
    attended = [each for case in async_spec_backend.steps for each in case.attended]
    assert all(each.right for each in attended), [each.not_run for each in attended]
