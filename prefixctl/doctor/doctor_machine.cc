#include <sys/timex.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "attention/kernels/kernels.h"
#include "prefixctl/doctor/doctor.h"
#include "prefixctl/show/output.h"

namespace prefixd::ctl {
namespace {

Finding ExamineKernel() {
  utsname name{};
  ::uname(&name);
  int major = 0, minor = 0;
  std::sscanf(name.release, "%d.%d", &major, &minor);
  Finding f{"kernel", Level::kOk, std::string(name.sysname) + " " + name.release, ""};
  if (major < 5 || (major == 5 && minor < 10)) {
    f.level = Level::kWarn;
    f.advice = "prefixd is tested from Linux 5.10 on; io_uring is older there, or missing";
  }
  return f;
}

Finding ExamineProcessor() {
  const std::string kernels = Kernels().name;
  std::ifstream in("/proc/cpuinfo");
  std::string model, flags;
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (model.empty() && line.starts_with("model name")) model = line.substr(colon + 2);
    if (flags.empty() && line.starts_with("flags")) flags = " " + line.substr(colon + 2) + " ";
  }
  std::string found;
  for (const char* flag :
       {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16"}) {
    if (flags.find(" " + std::string(flag) + " ") != std::string::npos) {
      found += (found.empty() ? "" : " ") + std::string(flag);
    }
  }
  Finding f{"processor", Level::kOk,
            std::to_string(::sysconf(_SC_NPROCESSORS_ONLN)) + " cores, " +
                (model.empty() ? "unknown" : model) + ": " +
                (found.empty() ? "no vectors beyond the base" : found) + "; the kernels for " +
                kernels + " run",
            ""};
  if (kernels != "avx2" && kernels != "avx512") {
    f.level = Level::kWarn;
    f.advice =
        "steps are several times slower without AVX2; a virtual machine may hide it "
        "(pass the host's processor on)";
  }
  return f;
}

Finding ExamineGraphics() {
  std::error_code failed;
  const std::string driver = FirstLine("/proc/driver/nvidia/version");
  const bool device = std::filesystem::exists("/dev/nvidia0", failed);
  if (driver.empty() && !device) {
    return {"GPU", Level::kOk, "no NVIDIA driver; steps run on the processor", ""};
  }
  if (!device) {
    return {"GPU", Level::kWarn, driver + "; but no /dev/nvidia0",
            "pass the device into this container or service (DeviceAllow=), or set compute = cpu"};
  }
  if (driver.empty()) {
    return {"GPU", Level::kWarn, "/dev/nvidia0 without a driver below /proc/driver/nvidia",
            "load the driver, or set compute = cpu"};
  }
  return {"GPU", Level::kOk, driver, ""};
}

Finding ExamineClock() {
  constexpr std::time_t kYear2024 = 1704067200;
  timespec last{};
  ::clock_gettime(CLOCK_MONOTONIC, &last);
  for (int i = 0; i < 1000; ++i) {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec < last.tv_sec || (now.tv_sec == last.tv_sec && now.tv_nsec < last.tv_nsec)) {
      return {"clock", Level::kFail, "the monotonic clock went back",
              "choose another clock source (/sys/devices/system/clocksource)"};
    }
    last = now;
  }
  timespec real{};
  ::clock_gettime(CLOCK_REALTIME, &real);
  const std::string now = Time(int64_t{real.tv_sec} * 1000) + " UTC";
  if (real.tv_sec < kYear2024) {
    return {"clock", Level::kFail, now,
            "times to live and certificates need the right time; set it"};
  }
  timex state{};
  const int kernel = ::adjtimex(&state);
  if (kernel < 0) return {"clock", Level::kOk, now + "; whether it is synchronised is unknown", ""};
  if ((state.status & STA_UNSYNC) != 0) {
    return {"clock", Level::kWarn, now + ", not synchronised",
            "prefixes expire by this clock; run an NTP service (systemd-timesyncd, chrony)"};
  }
  return {"clock", Level::kOk, now + ", synchronised", ""};
}

}  // namespace

std::vector<Finding> ExamineMachine() {
  return {ExamineKernel(), ExamineProcessor(), ExamineGraphics(), ExamineClock()};
}

}  // namespace prefixd::ctl
