"""A checkpoint restores the state bit for bit; one that does not fit or is damaged is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW, Optimizer

from bapo_core.config.training import LoraConfig
from bapo_core.errors import BapoError
from services.common.objectstore import ObjectStore, ObjectStoreError
from services.stack.stack import Endpoints
from services.trainer.checkpoint import SUPERVISED_OPTIMIZER as SUPERVISED
from services.trainer.checkpoint import Checkpointer, ModuleStates, cpu_mesh, load_checkpoint
from services.trainer.critic import Critic
from services.trainer.lora import add_adapters
from services.trainer.policy import Policy, make_optimizer
from services.trainer.ranks import init_distributed
from tests.integration.support.driver import Driver, small_config
from tests.micro import micro_model


@pytest.fixture(scope="module")
def driver(stack: Endpoints) -> Driver:
    driver = Driver(stack, small_config("checkpoints"))
    for step in range(1, 4):
        driver.run_step(step)
    return driver


@pytest.fixture
def checkpointer(driver: Driver, tmp_path: Path) -> Iterator[Checkpointer]:
    with init_distributed() as ranks:
        store = ObjectStore(driver.stack.object_store)
        yield Checkpointer(driver.client, store, scratch=tmp_path, ranks=ranks)


def trained(seed: int = 0, **changes: Any) -> tuple[Policy, Optimizer]:
    """Builds a policy and an optimizer with moments, after one update of an arbitrary loss."""
    policy = Policy(micro_model(seed=seed, **changes))
    optimizer = AdamW(policy.parameters(), lr=1e-2)
    _update(policy, optimizer)
    return policy, optimizer


def trained_modules(policy: Policy, optimizer: Optimizer) -> ModuleStates:
    return {"model": (policy, {"optimizer": optimizer})}


def _update(policy: nn.Module, optimizer: Optimizer) -> None:
    sum(parameter.square().sum() for parameter in policy.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def flat(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


def test_training_goes_on_while_a_checkpoint_is_saved(
    driver: Driver, checkpointer: Checkpointer, tmp_path: Path
) -> None:
    policy, optimizer = trained()
    checkpointer.save(1, trained_modules(policy, optimizer))
    _update(policy, optimizer)
    after = flat(policy)
    # Reuses the memory of the first, which must have been uploaded before.
    checkpointer.save(2, trained_modules(policy, optimizer))
    _update(policy, optimizer)
    checkpointer.settle()
    store = ObjectStore(driver.stack.object_store)
    kept = {row.step: row for row in driver.client.checkpoints()}
    other, other_optimizer = trained(seed=1)
    stored = driver.client.latest_checkpoint()
    assert stored is not None
    assert stored.number == 2
    load_checkpoint(stored, trained_modules(other, other_optimizer), store=store, scratch=tmp_path)
    assert torch.equal(flat(other), after)
    first = stored.model_copy(
        update={"number": 1, "uri": kept[1].uri, "manifest_digest": kept[1].manifest_digest}
    )
    load_checkpoint(first, trained_modules(other, other_optimizer), store=store, scratch=tmp_path)
    # The moments are restored too: the same update gives the same weights.
    _update(other, other_optimizer)
    assert torch.equal(flat(other), after)


def test_a_checkpoint_that_does_not_fit_or_is_damaged_is_refused(
    driver: Driver, checkpointer: Checkpointer, tmp_path: Path
) -> None:
    checkpointer.save(3, trained_modules(*trained()))
    checkpointer.settle()
    store = ObjectStore(driver.stack.object_store)
    stored = driver.client.latest_checkpoint()
    assert stored is not None
    for changes in ({"num_hidden_layers": 3}, {"vocab_size": 17}):
        other = trained_modules(*trained(**changes))
        with pytest.raises(BapoError, match="does not fit the model"):
            load_checkpoint(stored, other, store=store, scratch=tmp_path)
    key = next(key for key in store.keys(f"{stored.uri}/") if key.endswith(".distcp"))
    data = store._get(key)
    store.put(key, data[:-1])
    with pytest.raises(ObjectStoreError, match="do not have the digest"):
        load_checkpoint(stored, trained_modules(*trained()), store=store, scratch=tmp_path)


def test_adapters_are_saved_without_the_model_and_continue_identically(
    driver: Driver, checkpointer: Checkpointer, tmp_path: Path
) -> None:
    def adapted(seed: int) -> tuple[Policy, Optimizer]:
        policy = Policy(micro_model())
        add_adapters(policy.model, LoraConfig(rank=2), seed)
        optimizer = AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
        _update(policy, optimizer)
        return policy, optimizer

    policy, optimizer = adapted(1)
    driver.run_step(4)
    checkpointer.save(4, trained_modules(policy, optimizer))
    checkpointer.settle()
    _update(policy, optimizer)
    stored = driver.client.latest_checkpoint()
    assert stored is not None
    assert stored.number == 4
    other, other_optimizer = adapted(2)
    assert not torch.equal(flat(other), flat(policy))
    store = ObjectStore(driver.stack.object_store)
    load_checkpoint(stored, trained_modules(other, other_optimizer), store=store, scratch=tmp_path)
    _update(other, other_optimizer)
    assert torch.equal(flat(other), flat(policy))


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_is_saved_and_continues_with_the_policy(
    driver: Driver, checkpointer: Checkpointer, tmp_path: Path, tied: bool
) -> None:
    def both(seed: int) -> ModuleStates:
        policy, optimizer = trained(seed, tie_word_embeddings=tied)
        critic = Critic(Policy(micro_model(seed=seed, tie_word_embeddings=tied)))
        critic_optimizer = AdamW([p for p in critic.parameters() if p.requires_grad], lr=1e-2)
        modules: ModuleStates = {
            "model": (policy, {"optimizer": optimizer}),
            "critic": (critic, {"critic_optimizer": critic_optimizer}),
        }
        _update_all(modules)
        return modules

    step = 5 + tied
    driver.run_step(step)
    one, other = both(1), both(2)
    checkpointer.save(step, one)
    checkpointer.settle()
    _update_all(one)
    stored = driver.client.latest_checkpoint()
    assert stored is not None
    assert stored.number == step
    store = ObjectStore(driver.stack.object_store)
    load_checkpoint(stored, other, store=store, scratch=tmp_path)
    _update_all(other)
    for name, (module, _) in one.items():
        head = "" if name == "model" else "model.lm_head.weight"  # the critic's is not trained
        expected, restored = (dict(m.named_parameters()) for m in (module, other[name][0]))
        assert all(torch.equal(expected[key], restored[key]) for key in expected if key != head)


def _update_all(trained: ModuleStates) -> None:
    for module, optimizers in trained.values():
        for optimizer in optimizers.values():
            _update(module, optimizer)


@pytest.mark.parametrize("updates_before", [0, 1])
def test_the_optimizer_of_supervised_updates_continues_identically(
    driver: Driver, checkpointer: Checkpointer, tmp_path: Path, updates_before: int
) -> None:
    """Also where a checkpoint is stored before the first supervised update."""

    def supervised(seed: int) -> ModuleStates:
        policy = Policy(micro_model(seed=seed))
        settings = small_config("checkpoints").optimizer
        optimizers = {
            name: make_optimizer(policy, 1e-2, settings) for name in ("optimizer", SUPERVISED)
        }
        _update(policy, optimizers["optimizer"])
        for _ in range(updates_before):
            _update(policy, optimizers[SUPERVISED])
        return {"model": (policy, optimizers)}

    step = 7 + updates_before
    driver.run_step(step)
    one, unsaved, other = supervised(1), supervised(1), supervised(2)
    checkpointer.save(step, one)
    checkpointer.settle()
    stored = driver.client.latest_checkpoint()
    assert stored is not None
    assert stored.number == step
    store = ObjectStore(driver.stack.object_store)
    load_checkpoint(stored, other, store=store, scratch=tmp_path)
    for modules in (one, unsaved, other):
        _update_all(modules)
    weights, never_saved, restored = (
        flat(modules["model"][0]) for modules in (one, unsaved, other)
    )
    assert torch.equal(weights, restored)
    assert torch.equal(weights, never_saved), "a checkpoint changes what is trained after it"


def test_a_checkpoint_without_the_optimizer_of_supervised_updates_is_refused(
    driver: Driver, checkpointer: Checkpointer, tmp_path: Path
) -> None:
    """Earlier versions made supervised updates with the policy's optimizer."""
    policy, optimizer = trained()
    driver.run_step(9)
    checkpointer.save(9, trained_modules(policy, optimizer))
    checkpointer.settle()
    stored = driver.client.latest_checkpoint()
    assert stored is not None
    assert stored.number == 9
    both = {"optimizer": optimizer, SUPERVISED: trained()[1]}
    store = ObjectStore(driver.stack.object_store)
    with pytest.raises(BapoError, match=r"no state of the optimizer of supervised .*start a new"):
        load_checkpoint(stored, {"model": (policy, both)}, store=store, scratch=tmp_path)


def test_copies_of_a_gpus_shards_stay_on_the_cpu() -> None:
    """`DTensor.from_local` moves its tensor to the device of its mesh."""
    with init_distributed():
        mesh = init_device_mesh("cpu", (1,))
        assert cpu_mesh(mesh) is mesh
        of_gpus = Mock(device_type="cuda")
        of_gpus.size.return_value = 1
        made = cpu_mesh(of_gpus)
        assert (made.device_type, made.size()) == ("cpu", 1)
        assert cpu_mesh(of_gpus) is made
