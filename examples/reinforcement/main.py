# SPDX-License-Identifier: Apache-2.0
"""PPO balances gymnasium's CartPole. Each rank plays in environments of its own; their gradients are averaged.

python main.py                                    one process, 8 environments
python main.py --devices 2                        two processes, 8 environments each: half as many updates
python main.py --env Acrobot-v1 --total-steps 200000

From "Proximal Policy Optimization Algorithms" (Schulman et al., 2017): the clipped objective, with advantages from
"High-Dimensional Continuous Control Using Generalized Advantage Estimation" (Schulman et al., 2015).
"""

import argparse
from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import fabric as L
from fabric.utilities.imports import require_extra

ENVS, ROLLOUT = 8, 128  # per rank: environments, and steps in each of them between two updates
EPOCHS, MINIBATCH = 4, 256  # passes over a rollout, samples per rank and gradient
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 1e-3


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    for layer, size in ((layers[0], 2**0.5), (layers[2], 2**0.5), (layers[4], gain)):
        nn.init.orthogonal_(layer.weight, size)
        nn.init.zeros_(layer.bias)
    return layers


class Agent(nn.Module):
    """Observations of shape (n, inputs) to logits of shape (n, actions) and values of shape (n,)."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.actor, self.critic = mlp(inputs, actions, gain=0.01), mlp(inputs, 1, gain=1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(observations), self.critic(observations).squeeze(-1)


def advantages_of(rewards: Tensor, dones: Tensor, values: Tensor) -> Tensor:
    """Generalized advantages of shape (ROLLOUT, ENVS); `values` has one row more, the value of where it ended."""
    advantages, following = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        surprise = rewards[t] + GAMMA * values[t + 1] * ~dones[t] - values[t]
        following = advantages[t] = surprise + GAMMA * LAMBDA * following * ~dones[t]
    return advantages


def loss_of(agent: nn.Module, observations: Tensor, actions: Tensor, old: Tensor, gain: Tensor, goal: Tensor) -> Tensor:
    logits, values = agent(observations)
    policy = Categorical(logits=logits)
    ratio = (policy.log_prob(actions) - old).exp()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    objective = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    return 0.5 * F.mse_loss(values, goal) - objective - ENTROPY * policy.entropy().mean()


def main(args: argparse.Namespace) -> None:
    require_extra("examples/reinforcement", extra="examples", requirement="gymnasium")
    import gymnasium as gym

    L.seed_everything(args.seed)
    fabric = L.Fabric(
        accelerator=args.accelerator, devices=args.devices, strategy=args.strategy, precision=args.precision
    )
    fabric.launch()

    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.make(args.env)] * ENVS, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    agent = Agent(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    agent, optimizer = fabric.setup(agent, optimizer)
    # The agent is the same on all ranks. What is drawn from here on is each rank's own: its environments, its actions.
    L.seed_everything(args.seed + fabric.global_rank, verbose=False)
    observation, _ = envs.reset(seed=args.seed + ENVS * fabric.global_rank)  # environment i gets the i-th seed after it

    steps_per_update = ENVS * ROLLOUT * fabric.world_size
    updates = max(1, args.total_steps // steps_per_update)
    returns, finished = torch.zeros(ENVS), deque(maxlen=20)  # of running episodes, and of this rank's last ones
    for update in range(1, updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - (update - 1) / updates)

        # Play.
        rollout = []
        with torch.no_grad():
            for _ in range(ROLLOUT):
                seen = torch.as_tensor(observation, dtype=torch.float32, device=fabric.device)
                logits, value = agent(seen)
                policy = Categorical(logits=logits)
                action = policy.sample()
                observation, reward, terminated, truncated, info = envs.step(action.cpu().numpy())
                reward, done = torch.as_tensor(reward, dtype=torch.float32), torch.as_tensor(terminated | truncated)
                returns += reward
                finished.extend(returns[done].tolist())
                returns[done] = 0.0
                for i in truncated.nonzero()[0]:  # out of time, not fallen: what would have followed counts
                    end = torch.as_tensor(info["final_obs"][i], dtype=torch.float32, device=fabric.device)
                    reward[i] += GAMMA * agent(end)[1].cpu()
                rollout.append((seen, action, policy.log_prob(action), value, *fabric.to_device((reward, done))))
            seen, action, old, value, reward, done = map(torch.stack, zip(*rollout, strict=True))
            last = agent(torch.as_tensor(observation, dtype=torch.float32, device=fabric.device))[1]
            advantage = advantages_of(reward, done, torch.cat([value, last[None]]))
            samples = [x.flatten(0, 1) for x in (seen, action, old, advantage, advantage + value)]

        # Learn.
        for _ in range(EPOCHS):
            for chosen in torch.randperm(ENVS * ROLLOUT, device=fabric.device).split(MINIBATCH):
                optimizer.zero_grad()
                fabric.backward(loss_of(agent, *(x[chosen] for x in samples)))
                fabric.clip_gradients(agent, optimizer, max_norm=0.5)
                optimizer.step()

        # Tell. Ranks may have finished different numbers of episodes: sums and counts add up, means would not.
        if update % args.log_every == 0 or update == updates:
            total, count = fabric.all_gather(torch.tensor([sum(finished), len(finished)])).view(-1, 2).sum(dim=0)
            mean_return = float(total) / max(1, int(count))
            fabric.print(f"steps {update * steps_per_update:6d}  mean return {mean_return:6.1f}", flush=True)
    envs.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--accelerator", "--devices", "--strategy", "--precision"):
        parser.add_argument(flag)  # what is not said here, `fabric run`, the cluster and the machine decide
    parser.add_argument("--env", default="CartPole-v1", help="any environment with vectors to see and a choice to make")
    parser.add_argument("--total-steps", type=int, default=60_000, help="of all environments of all ranks together")
    parser.add_argument("--log-every", type=int, default=4, help="updates between two lines")
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
