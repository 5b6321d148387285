// A client that is a store of its own process: everything is passed straight through.
#include <utility>

#include "client_lib/client.h"

namespace prefixd {
namespace {

class EmbeddedClient final : public Client {
 public:
  explicit EmbeddedClient(std::unique_ptr<Store> store) : store_(std::move(store)) {}

  Status RegisterModel(const ModelSpec& spec) override { return store_->RegisterModel(spec); }
  Result<std::vector<ModelSpec>> Models() override { return store_->Models(); }
  Result<std::unique_ptr<PutStream>> BeginPut(const PutSpec& spec) override {
    return store_->BeginPut(spec);
  }
  Result<PrefixMatch> Match(std::string_view model, std::string_view tenant,
                            std::span<const uint32_t> tokens) override {
    return store_->Match(model, tenant, tokens);
  }
  Status WaitReady(std::string_view prefix, const ProgressFn& progress) override {
    return store_->WaitReady(prefix, progress);
  }
  Result<std::shared_ptr<Session>> Attach(const AttachSpec& spec) override {
    return store_->Attach(spec);
  }
  void StepBatch(std::span<StepRequest> requests) override { prefixd::StepBatch(requests); }
  Result<std::vector<PrefixSummary>> Prefixes() override { return store_->Prefixes(); }
  Result<PrefixDetail> Prefix(std::string_view prefix) override { return store_->Prefix(prefix); }
  Status Remove(std::string_view prefix) override { return store_->Remove(prefix); }
  Status SetRetention(std::string_view prefix, const Retention& retention) override {
    return store_->SetRetention(prefix, retention);
  }
  Result<VerifySummary> Verify(std::string_view prefix, const ProgressFn& progress) override {
    return store_->Verify(prefix, progress);
  }
  Result<RuntimeStats> Stats() override { return store_->stats(); }

 private:
  const std::unique_ptr<Store> store_;
};

}  // namespace

Result<std::unique_ptr<Client>> Client::OpenEmbedded(const RuntimeOptions& options) {
  PREFIXD_ASSIGN(auto store, Store::Open(options));
  return std::unique_ptr<Client>(std::make_unique<EmbeddedClient>(std::move(store)));
}

}  // namespace prefixd
