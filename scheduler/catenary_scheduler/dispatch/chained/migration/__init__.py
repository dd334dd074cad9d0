"""Sessions that go on elsewhere: asked to, drained, by a change of plan, or to be better placed."""
