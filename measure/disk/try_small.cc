#include "measure/disk/try_small.h"

#include <chrono>

#include "measure/disk/attach_time.h"
#include "measure/disk/storage_speed.h"
#include "measure/prompts/bench_prompt.h"

namespace prefixd::bench {

Result<RowSeconds> TrySmallPrompt(const ModelShape& model, uint32_t tokens,
                                  const std::filesystem::path& dir) {
  using Clock = std::chrono::steady_clock;
  const auto since = [](Clock::time_point begun) {
    return std::chrono::duration<double>(Clock::now() - begun).count();
  };
  RowSeconds seconds;
  const auto making = Clock::now();
  const Prompt prompt = SyntheticPrompt(model.Geometry(1), tokens, false);
  const double bytes = double(prompt.row_bytes());
  seconds.making = since(making) / bytes;
  SpeedOptions speed;
  speed.dir = dir;
  speed.parts = {"put"};
  speed.pairs = 2;
  speed.fio = false;
  PREFIXD_ASSIGN(const SpeedReport tried, MeasureSpeed(prompt, speed));
  seconds.putting = 1 / tried.lines.at("put").ours.median;
  const auto attaching = Clock::now();
  PREFIXD_ASSIGN(const AttachReport attached, MeasureAttach(prompt, dir / "attach", false, 1));
  static_cast<void>(attached);
  seconds.attaching = since(attaching) / bytes;
  return seconds;
}

}  // namespace prefixd::bench
